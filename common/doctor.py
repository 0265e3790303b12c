"""python -m common.doctor: what is installed and what runs here, to paste into an issue (common/prepare/doctor.py)."""

from common.prepare.doctor import main

if __name__ == "__main__":
    main(__doc__)
