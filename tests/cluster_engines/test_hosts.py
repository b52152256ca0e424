"""Two hosts of two workers each: network namespaces with a cable between them.

Skipped where this machine does not let us make them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.communicator_contract import CHECKS
from tests.cluster_engines.launching import PROGRAM, ended, started

HOSTS = {"first": "10.213.77.1", "second": "10.213.77.2"}
LINK = "arcable"  # at most 15 characters


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, list[str]]]:
    """Give, for each of two hosts, the words that run a command there."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is missing (apt-get install iproute2)")
    names = {host: f"ar-{host}-{os.getpid()}" for host in HOSTS}
    made = []
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
                made.append(name)
            first, second = names.values()
            ip("link", "add", LINK, "netns", first, "type", "veth", "peer", LINK, "netns", second)
            for host, name in names.items():
                ip("-n", name, "address", "add", f"{HOSTS[host]}/24", "dev", LINK)
                for device in ("lo", LINK):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield {host: ["ip", "netns", "exec", name] for host, name in names.items()}
    finally:
        for name in made:
            ip("netns", "delete", name)  # and with it its end of the cable


def test_torchrun_on_two_hosts(hosts: dict[str, list[str]]) -> None:
    processes = []
    for rank, (host, command) in enumerate(hosts.items()):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                    "--nproc-per-node", "2", "--node-rank", str(rank), "--master-addr",
                    HOSTS["first"], "--master-port", "29555",
                    "--local-addr", HOSTS[host]]  # fmt: skip
        variables = {"GLOO_SOCKET_IFNAME": LINK}
        processes.append(started([*command, *torchrun, PROGRAM, "contract"], variables))

    launched = ended(processes)

    assert launched.results == {rank: len(CHECKS) for rank in range(4)}, launched.output
    assert launched.codes == [0, 0]
