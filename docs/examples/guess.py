"""A number-guessing game of several turns, as an environment: --environment docs/examples/guess.py:Guess"""

ABOVE = 15  # numbers go from 0 to here


class Guess:
    """The secret stands in the row (extra_info.secret). A right guess ends the game; earlier ones are worth more."""

    def reset(self, extra_info: dict, **row) -> str:
        self.secret, self.guesses = int(extra_info["secret"]), 0
        self.reward, self.done = 0.0, False
        return f" It is from 0 to {ABOVE}."

    def guess(self, number: int) -> str:
        """Guess the secret number.

        Args:
            number: Your guess.

        Returns:
            Whether the secret number is higher or lower.
        """
        if not isinstance(number, int):
            raise ValueError("the number must be an integer")
        self.guesses += 1
        if number == self.secret:
            self.reward, self.done = max(0.0, 1.1 - 0.1 * self.guesses), True
            return "right"
        return "higher" if number < self.secret else "lower"
