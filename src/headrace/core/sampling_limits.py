"""What a request may ask for at most: the server refuses more in a body, the engine from anybody."""

from __future__ import annotations

# From OpenAI's API reference (chat completions: n, top_logprobs); a bound of some kind is needed, since
# each sequence and each alternative takes memory.
MAX_CHOICES = 128
MAX_LOGPROBS = 20
# Also OpenAI's: presence_penalty and frequency_penalty, logit_bias.
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
# Nobody defines a range; people use 1 to 1.3. By far less than this logits grow beyond float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
