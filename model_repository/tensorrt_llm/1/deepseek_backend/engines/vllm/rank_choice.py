"""Chooses the rank of data parallelism for each request, where vLLM's own choice is uneven."""

from __future__ import annotations


class RankChoice:
    """The number of open requests on each rank; the rank with the fewest gets the next request.

    vLLM before 0.33 goes by what its ranks report. A rank that computes a long prompt reports nothing of what has come
    since, and each report makes vLLM forget what it has sent. So some ranks get many of the requests of one second, and
    all ranks are as slow as the fullest: every iteration is one of all of them.
    """

    def __init__(self, num_ranks: int) -> None:
        """With fewer than two ranks there is nothing to choose."""
        self._num_open = [0] * num_ranks
        self._first = 0
        """The rank that comes first where several have the fewest."""

    def take(self) -> int | None:
        """Return the rank for a request, and count it there; None leaves the choice to vLLM."""
        num_ranks = len(self._num_open)
        if num_ranks < 2:
            return None
        ranks = ((self._first + distance) % num_ranks for distance in range(num_ranks))
        rank = min(ranks, key=self._num_open.__getitem__)
        self._first = (rank + 1) % num_ranks
        self._num_open[rank] += 1
        return rank

    def give_back(self, rank: int | None) -> None:
        """Count a request as ended; `rank` is what `take` returned for it."""
        if rank is not None:
            self._num_open[rank] -= 1
