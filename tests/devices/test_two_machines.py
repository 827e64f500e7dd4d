"""Two machines, as network namespaces joined by a cable, run torchrun with a rendezvous; the cable is pulled for a
while. They train what one process trains.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from small_runs import difference, fit, table

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
MACHINES = ("fprnn_left", "fprnn_right")
ADDRESSES = ("10.181.0.1", "10.181.0.2")
CABLE = ("fprnn0", "fprnn1")  # its two ends


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[None]:
    """Two network namespaces that reach each other and nothing else."""
    try:
        made = ip("netns", "add", MACHINES[0], check=False)
    except FileNotFoundError:
        pytest.skip("there is no program ip, which makes network namespaces")
    if made.returncode:
        pytest.skip(f"this user may not make network namespaces: {made.stderr.strip()}")
    try:
        ip("netns", "add", MACHINES[1])
        ip("link", "add", CABLE[0], "netns", MACHINES[0], "type", "veth", "peer", CABLE[1], "netns", MACHINES[1])
        for machine, address, end in zip(MACHINES, ADDRESSES, CABLE, strict=True):
            ip("-n", machine, "address", "add", f"{address}/24", "dev", end)
            ip("-n", machine, "link", "set", end, "up")
            ip("-n", machine, "link", "set", "lo", "up")
        yield
    finally:
        for machine in MACHINES:
            ip("netns", "delete", machine, check=False)


def wait_for(condition: Callable[[], bool], processes: list[subprocess.Popen], folder: Path) -> None:
    deadline = monotonic() + 120
    while not condition():
        assert all(process.poll() is None for process in processes), said(folder)
        assert monotonic() < deadline, said(folder)
        sleep(0.02)


def said(folder: Path) -> str:
    return "\n".join((folder / f"{machine}.log").read_text()[-3000:] for machine in MACHINES)


def steps(folder: Path) -> int:
    return max((step for name, step in table(folder) if name == "train/loss"), default=0) if folder.exists() else 0


def test_two_machines_train_what_one_process_does(machines: None, run: Callable[..., Path], tmp_path: Path) -> None:
    longer = ["--trainer.max_steps=400", "--trainer.val_check_interval=200"]
    part = f"--config={HARDWARE / 'many_nodes.yaml'}"
    arguments = [*fit("copying", tmp_path, part, "--trainer.accelerator=cpu", "--trainer.devices=1"), *longer]
    rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29531"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--rdzv-id=run"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = []
    for machine, address, end in zip(MACHINES, ADDRESSES, CABLE, strict=True):
        own = [f"--local-addr={address}", f"--rdzv-conf=is_host={machine == MACHINES[0]}"]
        command = ["ip", "netns", "exec", machine, *torchrun, *own, "-m", "fprnn_lightning"]
        with (tmp_path / f"{machine}.log").open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, *arguments],
                    **{"cwd": tmp_path, "stdout": output, "stderr": subprocess.STDOUT},
                    env=environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": end},
                )
            )
    try:
        folder = tmp_path / "logs" / "copying" / "lstm" / "run_0"
        wait_for(lambda: (folder / "metrics.csv").exists() and steps(folder) > 20, processes, tmp_path)
        ip("-n", MACHINES[1], "link", "set", CABLE[1], "down")
        sleep(1)
        reached = steps(folder)
        sleep(2)
        assert steps(folder) == reached < 399, "alone, none goes on"
        ip("-n", MACHINES[1], "link", "set", CABLE[1], "up")
        for process in processes:
            assert process.wait(120) == 0, said(tmp_path)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [path.name for path in folder.parent.iterdir()] == ["run_0"]
    assert difference(folder, run("copying", 1, *longer), "train/loss") < 1e-4
