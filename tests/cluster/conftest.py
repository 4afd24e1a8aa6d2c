"""One small Ray for all tests of this folder: two machines as Ray counts them, both on this computer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def two_machines() -> Iterator[None]:
    """The one of this process has 2 CPUs and 2 GPUs, the other 3 CPUs. Both are only numbers. Ray gives a machine 30 s
    to appear, which it may take longer beside other tests: its clock stands still until then."""
    import ray
    from ray._private import node
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 * 2**20}
    head |= {"no_monitor": True, "include_log_monitor": False}  # nobody reads them: 2.5 of 14 CPU-s of a start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: 0.0}))
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=3, num_gpus=0, object_store_memory=80 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    cluster.shutdown()
