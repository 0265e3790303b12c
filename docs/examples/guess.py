"""A number-guessing game of several turns, as an environment: --environment docs/examples/guess.py:Guess"""

LAST, GUESSES = 3, 2  # numbers go from 1 to 3: two guesses find any of them, if the first is in the middle


class Guess:
    """The secret stands in the row (extra_info.secret). The reward is 1 for finding it."""

    def reset(self, extra_info: dict, **row) -> str:
        self.secret, self.guesses = int(extra_info["secret"]), []
        return f" It is from 1 to {LAST}."

    def guess(self, number: int) -> str:
        """Guess the secret number.

        Args:
            number: Your guess.

        Returns:
            Whether the secret number is higher or lower.
        """
        if not isinstance(number, int):
            raise ValueError("the number must be an integer")
        self.guesses.append(number)
        if number == self.secret:
            return "right"
        return f"{'higher' if number < self.secret else 'lower'} than {number}"

    @property
    def done(self) -> bool:
        return len(self.guesses) == GUESSES or self.secret in self.guesses

    def reward(self) -> float:
        return float(self.secret in self.guesses)
