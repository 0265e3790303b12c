"""verl's GSM8K interaction: a user who says whether the last answer is right.

--environment docs/examples/gsm8k_user.py:reply, for rows with extra_info.interaction_kwargs (name,
query, ground_truth), or for all rows if none has any
"""

from common.rewards.math import score_gsm8k

AGAIN = "Your response is incorrect! You need to reflect on your answer and try again."


def reply(messages: list[dict], ground_truth: str) -> tuple[str | None, float]:
    """(what the user says, or None if the answer is right; the reward of the turn, 1 or 0)."""
    right = score_gsm8k(messages[-1]["content"], ground_truth)["score"] == 1.0
    return (None, 1.0) if right else (AGAIN, 0.0)
