"""What a run has left in its folder, to look at: `python -m common.look RUN|FILE`."""
