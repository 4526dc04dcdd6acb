"""``headrace calibrate``: what it stores and what it refuses."""

import numpy as np
import pytest

from headrace.cli.main import main


@pytest.fixture(autouse=True)
def own_data(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_the_path_is_data_and_what_was_measured_is_a_note(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The mill stands where the brook leaves the wood. " * 40, encoding="utf-8")
    assert main(["calibrate", "tiny", "--text", str(text)]) == 0
    out, err = capsys.readouterr()
    with np.load(out.strip()) as found:
        along = found["directions"]
    assert along.shape == (8, 2, 4, 32)  # layers, key heads, directions, head
    np.testing.assert_allclose(
        along @ along.swapaxes(-1, -2), np.broadcast_to(np.eye(4), (8, 2, 4, 4)), atol=1e-5
    )
    assert "4 directions for each of 16 key heads" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"too short", "at least 256"),
        (b"", "at least 256"),
    ],
)
def test_texts_that_will_not_do_are_refused(content, message, capsys, tmp_path):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert main(["calibrate", "tiny", "--text", str(text)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
