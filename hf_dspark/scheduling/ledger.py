"""Whether drafting pays for itself, in the long run and by the clock."""

from __future__ import annotations

import math
import statistics
from collections import deque

from .outlook import PRIOR, Average

ALLOWANCE = 0.02  # share of plain decoding's time that drafting may lose for good
STAKE = 4  # plain rounds' worth of time that drafting may lose to begin with
CREDIT = 16  # most plain rounds' worth of time that drafting, having paid, may lose before it pauses
FEWEST, MOST = 2, 32  # drafted rounds before the first round to compare with, and before any other at most
COMPARED = 4  # rounds of one kind, at most, that the next of the other is compared with
DOUBT = 1  # comparisons that the profile weighs
PRICES = (0.5, 2.0)  # how far measured times may correct the profile
DEAREST_READING = 4.0  # times a usual draft that one may be charged with that has much to read


class Ledger:
    """
    Books what rounds brought and cost, in units of a plain round: its time, and its one token a row.

    A drafted round is credited with the plain rounds that its tokens would have taken and charged with its own time;
    plain rounds earn a small allowance; below zero, nothing is drafted until the allowance has paid for another try.

    What drafted rounds cost against plain ones is corrected by what is measured, by one factor within `PRICES` from
    drafted and plain rounds that followed each other; where an error of the profile might hide that drafting does not
    pay, single rounds without draft are inserted to learn it, after more and more drafted ones.

    The first draft behind a prompt, or after a pause, takes longer, as the drafter reads what it has missed. It is no
    measure of the others, so another one follows it; but after a pause it is charged with its time.

    A batch takes as long as its last row, so its tokens are those that count. What the other rows gain, for as much as
    it is worth, is lent until the batch has ended, for any row may be the last by then.
    """

    def __init__(self):
        self.credit = float(STAKE)
        self._speedup = Average(1.0, PRIOR)  # of the last row's tokens
        self._rate = Average(1.0, PRIOR)  # of all rows' for as much as they are worth
        self._log_price = Average(0.0, DOUBT)
        self._drafted_in_a_row = 0
        self._enough = FEWEST  # of these, for the next comparison
        self.forgive()

    @property
    def speedup(self) -> float:
        """Tokens per second of past rounds that drafted against plain decoding's, at least 1."""
        return max(self._speedup.value, 1.0)

    @property
    def rate(self) -> float:
        """The same of all rows, where tokens count for what they are worth: λ, in tokens a plain round."""
        return max(self._rate.value, 1.0)

    @property
    def price(self) -> float:
        """What a drafted round costs here and now, against the profile, if a plain round costs what it says."""
        return math.exp(self._log_price.value)

    def forgive(self) -> None:
        """Begin a request: loans are called in, debts dropped if drafts have paid lately, no round was the last."""
        self._lent = 0.0
        if self._speedup.value > 1 + ALLOWANCE:
            self.credit = max(self.credit, 1.0)
        self._missed = math.inf  # rounds that the drafter has not read
        self._has_read = False  # in the last round, more of them than usual
        self._kind = False  # whether the last rounds that can be compared drafted,
        self._slowness: deque[float] = deque(maxlen=COMPARED)  # and the logarithms of theirs

    def allows(self) -> bool:
        """Whether the round that begins may draft."""
        compare = self._drafted_in_a_row >= self._enough and self.speedup < PRICES[1]
        return self._has_read or (self.credit + self._lent >= 0 and not compare)

    def book(self, drafted: bool, tokens: float, spent: float, slowness: float, worth: float | None = None) -> None:
        """
        Take in a round.

        Args:
            drafted: whether it drafted.
            tokens: committed tokens, of the last row if there are several.
            spent: its time by the costs, with the price.
            slowness: its measured time, against that of the costs without the price.
            worth: what those of all rows are worth to it, if there are several.
        """
        worth = tokens if worth is None else worth
        self._has_read = drafted and self._missed > COMPARED
        self._missed = 0 if drafted else self._missed + 1
        pace = math.log(slowness)
        against = pace - statistics.fmean(self._slowness) if self._slowness else 0.0
        if self._has_read:
            spent *= min(max(math.exp(against) / self.price, 1.0), DEAREST_READING)
        else:
            if self._slowness and drafted != self._kind:
                cheapest, dearest = map(math.log, PRICES)
                self._log_price.add(min(max(against if drafted else -against, cheapest), dearest))
                self._slowness.clear()
                self._enough = min(2 * self._enough, MOST)
            self._kind = drafted
            self._slowness.append(pace)
        if drafted:
            self.credit += tokens - spent
            self._lent += worth - tokens
            self._drafted_in_a_row += 1
            self._speedup.add(tokens / spent, spent)
            self._rate.add(worth / spent, spent)
        else:
            self.credit += ALLOWANCE
            self._drafted_in_a_row = 0
        self.credit = min(self.credit, CREDIT)
