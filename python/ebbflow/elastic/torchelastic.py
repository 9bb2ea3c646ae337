"""Names of TorchElastic: its sampler, and how its processes find each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ebbflow.errors import SessionError, UnsupportedError


class ElasticDistributedSampler:
    """Stands in a ``DataLoader`` for the leases of a job, which share its records out.

    ``DataLoader(dataset, sampler=ElasticDistributedSampler(dataset))`` goes to
    :func:`ebbflow.join`. Each epoch has another order. No two processes get the same record, unless
    one of them fails or is slow.

    Args:
        dataset: The data set of the loader.
        num_replicas: Refused; the number of processes changes.
        rank: Refused; processes have none.
        start_index: Only 0. A job knows which records of an epoch it has trained.

    Raises:
        UnsupportedError: An argument is refused.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        start_index: int = 0,
    ) -> None:
        given = {"num_replicas": num_replicas, "rank": rank, "start_index": start_index or None}
        for name, value in given.items():
            if value is not None:
                raise UnsupportedError(
                    f"ElasticDistributedSampler: {name} = {value} is not the script's to say; the "
                    "master leases the records that are left to whoever takes part: remove it"
                )
        self._dataset = dataset

    def __len__(self) -> int:
        """Return the number of records of the data set."""
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        raise SessionError(
            "a DataLoader with ElasticDistributedSampler has no batches of its own; give it to "
            "ebbflow.join, and iterate job.epochs()"
        )

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: each epoch of a job has an order of its own."""


def rendezvous(
    *,
    rdzv_id: str,
    rdzv_endpoint: str | None = None,
    rdzv_backend: str = "ebbflow",
) -> dict[str, str]:
    """Return the arguments of :func:`ebbflow.join` by which processes of one job find each other.

    Args:
        rdzv_id: Name of the job, equal in all its processes.
        rdzv_endpoint: ``HOST:PORT`` or URL of the master. Default: as for ``master`` of ``join``.
        rdzv_backend: ``"ebbflow"``: the master.

    Raises:
        UnsupportedError: The backend is another one.
    """
    if rdzv_backend != "ebbflow":
        raise UnsupportedError(
            f"rdzv_backend = {rdzv_backend!r}: the processes of a job meet at the master; start "
            "`ebb master`, and give its address as rdzv_endpoint"
        )
    found = {"name": rdzv_id}
    if rdzv_endpoint is not None:
        url = rdzv_endpoint if "://" in rdzv_endpoint else f"http://{rdzv_endpoint}"
        found["master"] = url
    return found
