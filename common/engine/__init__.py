"""The rollout engines, one in each rank: vLLM, and its twin on transformers alone, with the same
methods."""
