"""Programs of the policy: an interpreter for each trajectory, which has nothing of this machine
(docs/sandbox.md)."""
