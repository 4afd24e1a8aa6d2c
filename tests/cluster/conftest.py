"""One small Ray for all tests of this folder: two machines as Ray counts them, both on this computer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def two_machines() -> Iterator[None]:
    """The one of this process has 2 CPUs and 2 GPUs, the other 3 CPUs. Both are only numbers."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=3, num_gpus=0, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    cluster.shutdown()
