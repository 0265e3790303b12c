"""python -m common.doctor: what is installed and what runs here, to paste into an issue (common/look/doctor.py)."""

from common.look.doctor import doctor

if __name__ == "__main__":
    doctor()
