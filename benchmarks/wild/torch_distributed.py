"""torch's own tests of data parallel training, as `torch.testing` holds them, over gloo: a suite of `suites.toml`.

BACKEND, WORLD_SIZE and TEMP_DIR are read from the environment when the tests are imported.
"""

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestGloo(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """Each test starts its own ranks; without them, the bodies of the tests would not run and all of them would pass."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
