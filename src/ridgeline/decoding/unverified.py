"""Drafts that were not verified, compared with what comes: it costs nothing, and texts change."""

from ridgeline.decoding.acceptance import Acceptance
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategy import SequenceView


class Unverified:
    """Stores drafts that were too unlikely to pay until it is known how they would have fared."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, list[Draft]]] = {}  # with how many tokens were known, by sequence

    def add(self, view: SequenceView, draft: Draft) -> None:
        """Note a draft, unless one that was made before is still to be compared."""
        known, drafts = self._drafts.setdefault(view.seq_id, (len(view.token_ids), []))
        if known == len(view.token_ids):
            drafts.append(draft.first_way())

    def compare(self, view: SequenceView, acceptance: Acceptance) -> None:
        """Show `acceptance` how a sequence's drafts would have fared, once as many tokens came as the longest has."""
        if (unverified := self._drafts.get(view.seq_id)) is None:
            return
        known, drafts = unverified
        if len(view.token_ids) - known < max(len(draft.token_ids) for draft in drafts):
            return
        del self._drafts[view.seq_id]
        for draft in drafts:
            came = view.token_ids[known : known + len(draft.token_ids)]
            right = next((i for i, token in enumerate(came) if token != draft.token_ids[i]), len(came))
            acceptance.observe(view.seq_id, draft.kind, len(came), right)

    def forget(self, view: SequenceView) -> None:
        """Forget the sequence: it has ended."""
        self._drafts.pop(view.seq_id, None)
