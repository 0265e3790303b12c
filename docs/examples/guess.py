"""A number-guessing game of several turns, as an environment: --environment
docs/examples/guess.py:Guess"""

# numbers go from 1 to 7: three guesses find any of them, each in the middle of what is left
LAST, GUESSES = 7, 3


class Guess:
    """The secret stands in the row (extra_info.secret). The reward is 1 for finding it."""

    def reset(self, extra_info: dict, **row) -> str:
        self.secret, self.guesses = int(extra_info["secret"]), []
        self.low, self.high = 1, LAST
        return f" It is {self.low} to {self.high}."

    def guess(self, n: int) -> str:
        """Guess the secret number.

        Args:
            n: Your guess.

        Returns:
            Whether the secret number is higher or lower, and what is left.
        """
        if not isinstance(n, int):
            raise ValueError("the number must be an integer")
        self.guesses.append(n)
        if n == self.secret:
            return "right"
        if n < self.secret:
            self.low = max(self.low, n + 1)
        else:
            self.high = min(self.high, n - 1)
        return f"{'higher' if n < self.secret else 'lower'}: {self.low} to {self.high}"

    @property
    def done(self) -> bool:
        return len(self.guesses) == GUESSES or self.secret in self.guesses

    def reward(self) -> float:
        return float(self.secret in self.guesses)
