"""A reward in which answers of a few tokens differ, so that short runs have gradients."""


def kinds(solution_str: str, **_) -> int:
    return len(set(solution_str))
