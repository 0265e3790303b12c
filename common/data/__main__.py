# where `python -m common.data` has gone
raise SystemExit("it is now: python -m common.look FILE [--tokenizer NAME] [--rows 2]")
