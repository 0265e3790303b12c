"""A replication of PyVision-RL (arXiv 2602.20739), as a user of this repository would write it:
README.md."""
