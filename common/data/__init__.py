"""Files -> rows -> prompts and conversations as token ids, for RL and supervised training alike."""
