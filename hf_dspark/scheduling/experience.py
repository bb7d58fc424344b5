"""What past requests taught the schedulers of a drafter."""

from __future__ import annotations

from .block_width import BlockWidth
from .ledger import Ledger
from .outlook import Outlook


class Experience:
    """
    Kept from request to request, so that each need not learn anew what drafts are worth. Where drafts have paid, a
    request owes nothing for the one before it: it may try a draft, whatever that lost.

    Args:
        length: the most tokens a row and round.
    """

    def __init__(self, length: int):
        self.ledger, self.outlook, self.width = Ledger(), Outlook(length), BlockWidth(length)

    def begin_request(self) -> None:
        self.ledger.forgive()
