"""What would make a step cheaper, in words."""

from __future__ import annotations

from headrace.core.words import counted, plural
from headrace.explain import advice, leaf
from headrace.explain.cost import price
from headrace.explain.running_cost import running_cost

NOTABLE = 0.05  # share of a step from which a class is worth a sentence
WORTH_SAYING = 0.01  # changes of less than a hundredth of the throughput are left out


def advice_lines(step: advice.Calibrated) -> list[str]:
    """Drafts, batches, bits and sampling: a sentence or two of each that has something to say."""
    lines: list[str] = []
    if step.rows.decode:
        lines.append(advice.speculation(step).text())
        lines.append(_batching(step))
    moe = step.model.spec.moe
    if moe is not None and step.model.misses_of_twice_the_slots is not None:
        need = advice.offloaded_break_even(moe.num_experts, moe.num_experts_per_token)
        lines.append(
            f"Where moving missing experts is all that counts, and routing is uniform, drafting needs an "
            f"acceptance of {need:.0%}: 1 - {moe.num_experts_per_token}/{moe.num_experts}."
        )
    bits = 8 * step.model.weights_nbytes / sum(s.elements for s in step.model.matrices.values())
    gain = step.step_s / advice.with_weight_bits(step, advice.FEW_BITS)
    if gain > 1 + WORTH_SAYING:
        lines.append(
            f"Quantisation: the weights take {bits:.1f} bits on average; {advice.FEW_BITS} would make "
            f"the step {gain:.2f} times faster if the kernels kept their distance from the floor."
        )
    else:
        lines.append(
            f"Quantisation: fewer bits than the weights' {bits:.1f} would hardly change this step."
        )
    sampling = step.measured.get(leaf.SAMPLING, 0.0) / step.step_s
    if sampling > NOTABLE:
        lines.append(
            f"Sampling takes {sampling:.0%} of the step: it reads all {step.model.spec.vocab:,} logits once "
            "for a greedy token, three times with top-k or top-p."
        )
    return lines


def _batching(step: advice.Calibrated) -> str:
    """What more sequences would give, as far as the KV pool holds them."""
    gains, most = advice.batching(step), step.most_times
    full = ""
    if most is not None and step.room is not None:
        longest = max(new + cached for new, cached in step.rows.sequences)
        full = (
            f"the KV pool of {counted(step.room.num_tokens, 'token', form=',')} holds "
            f"{counted(step.room.sequences(longest), 'sequence')} of {longest:,} (`headrace serve "
            "--kv-tokens` sets its size)"
        )
    if not gains:
        return f"Batching: {full}."
    best = max(gains, key=lambda gain: gain.tokens_per_s)
    now = step.rows.tokens / step.step_s
    line = (
        f"Batching: {best.batch} times the sequences give {best.tokens_per_s / now:.1f} times the "
        f"tokens, each sequence {now * best.batch / best.tokens_per_s:.1f} times slower."
    )
    return f"{line} No more fit: {full}." if full and best.batch == most else line


def threads_lines(step: advice.Calibrated, threads: int | None) -> list[str]:
    """Whether cores are left, and how much of the step they could help."""
    cores = step.machine.host.cores
    if threads is None or step.model.gpu:
        return []
    if threads >= cores:
        return [
            "Threads: " + plural(cores, "the only core computes.", f"all {cores} cores compute.")
        ]
    bound = sum(
        step.measured[name]
        for name, one in running_cost(step.model, step.rows).items()
        if name in step.measured and price(one.work, step.machine).bound == "cpu"
    )
    return [
        f"Threads: {threads} of {counted(cores, 'core')} {plural(threads, 'computes', 'compute')}; "
        f"--threads {cores} can help the {bound / step.step_s:.0%} of the step that arithmetic binds, and "
        "the rest until the memory's rate is reached."
    ]
