"""The repaired interpreter, against torch: other tests of kernels rest on it."""

import torch
import triton
import triton.language as tl

from tests.fixtures.triton_interpreter import DEVICE, needs_triton, only_interpreted

pytestmark = needs_triton


@triton.jit
def _dot(a, b, out, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _cast(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def _sum_to(x, out, count, n: tl.constexpr):
    total = tl.zeros((n,), tl.float32)
    for i in range(0, count):
        total += tl.load(x + i * n + tl.arange(0, n)).to(tl.float32)
    tl.store(out + tl.arange(0, n), total)


@triton.jit
def _bf16_arithmetic(x, y, out, n: tl.constexpr):
    at = tl.arange(0, n)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(a > b, a * b, a + b))
    tl.store(out + n, tl.sum(a, 0))
    tl.store(out + n + 1, tl.max(a, 0))


@triton.jit
def _scaled(a, sa, b, sb, out, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, g: tl.constexpr):
    rows, cols, half = tl.arange(0, m)[:, None], tl.arange(0, n), tl.arange(0, k // 2)
    groups = tl.arange(0, k // g)[None, :]
    left = tl.load(a + rows * (k // 2) + half[None, :])
    right = tl.load(b + cols[None, :] * (k // 2) + half[:, None])
    left_scale = tl.load(sa + rows * (k // g) + groups)
    right_scale = tl.load(sb + cols[:, None] * (k // g) + groups)
    product = tl.dot_scaled(left, left_scale, "e2m1", right, right_scale, "e2m1")
    tl.store(out + rows * n + cols[None, :], product)


def test_bf16_products_are_of_the_values():
    a, b = (torch.randn(16, 16, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty(16, 16, device=DEVICE)
    _dot[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


def test_casts_round_to_nearest_even_and_saturate():
    x = torch.cat((torch.randn(500), torch.tensor([1e-40, 3e-5, 2**-10, 447.0, 300.0, 0.0]))).to(
        DEVICE
    )
    x = torch.cat(
        (x, torch.tensor([1.99999, -1.99999, 65535.0, 1 + 2**-8, 1 + 3 * 2**-8, -0.0]).to(DEVICE))
    )
    assert len(x) == 512
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty(512, device=DEVICE, dtype=dtype)
        _cast[(1,)](x, out, 512)
        top = torch.finfo(dtype).max
        expected = (x.clamp(-top, top) if dtype.itemsize == 1 else x).to(dtype)
        assert torch.equal(out.float(), expected.float()), dtype
        back = torch.empty(512, device=DEVICE)
        _cast[(1,)](expected, back, 512)
        assert torch.equal(back, expected.float())


@only_interpreted
def test_integers_become_bf16_by_value():
    out = torch.empty(8, dtype=torch.bfloat16)
    _cast[(1,)](torch.arange(-3, 5, dtype=torch.int32), out, 8)
    assert out.tolist() == [-3, -2, -1, 0, 1, 2, 3, 4]


def test_a_loop_may_end_at_a_run_time_value():
    x = torch.randn(5, 16, device=DEVICE)
    out = torch.empty(16, device=DEVICE)
    _sum_to[(1,)](x, out, 3, 16)
    torch.testing.assert_close(out, x[:3].sum(0))


@only_interpreted
def test_bf16_arithmetic_is_of_the_values():
    x, y = torch.randn(32).bfloat16(), torch.randn(32).bfloat16()
    out = torch.empty(34, dtype=torch.bfloat16)
    _bf16_arithmetic[(1,)](x, y, out, 32)
    assert torch.equal(out[:32], torch.where(x > y, x * y, x + y))
    torch.testing.assert_close(out[32].float(), x.float().sum(), rtol=1e-2, atol=1e-2)
    assert out[33] == x.max()


@only_interpreted
def test_scaled_products_read_both_kinds_of_scale():
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    a, b = (torch.randint(0, 256, (16, 32), dtype=torch.uint8) for _ in range(2))

    def values(codes, scales, group):
        x = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).reshape(
            16, 64
        )
        return x * scales.repeat_interleave(group, 1)

    for group in (32, 16):
        if group == 32:
            sa, sb = (torch.randint(120, 132, (16, 2), dtype=torch.uint8) for _ in range(2))
            fa, fb = (torch.exp2(s.float() - 127) for s in (sa, sb))
        else:
            sa, sb = (torch.rand(16, 4).add(0.1).to(torch.float8_e4m3fn) for _ in range(2))
            fa, fb = sa.float(), sb.float()
        out = torch.empty(16, 16)
        _scaled[(1,)](a, sa, b, sb, out, 16, 16, 64, group)
        torch.testing.assert_close(out, values(a, fa, group) @ values(b, fb, group).T)
