"""How the accelerators of a host are dealt among its processes, from what such hosts list."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import ClusterError
from meshwright.launch.devices import device_variables


def listed(root: Path, files: dict[str, str]) -> Path:
    """A folder that stands for ``/`` of a host."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def tpu_host(root: Path, chips: int, device: str = "0x0063") -> Path:
    card = "sys/bus/pci/devices/0000:00:{:02}.0"
    files = {f"{card.format(n)}/vendor": "0x1ae0\n" for n in range(chips + 1)}
    files |= {f"{card.format(n)}/device": f"{device}\n" for n in range(chips)}
    files |= {f"{card.format(chips)}/device": "0x0042\n"}  # Google's network card
    files |= {"sys/bus/pci/devices/0000:00:99.0/vendor": "0x8086\n"}
    return listed(root, files)


def test_gpus_are_dealt_in_the_order_of_their_numbers(tmp_path):
    root = listed(tmp_path, {f"dev/nvidia{n}": "" for n in (10, 2, 0, 1)} | {"dev/nvidiactl": ""})
    assert device_variables(2, None, {}, root=root) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,10"},
    ]
    chosen = {"CUDA_VISIBLE_DEVICES": "GPU-5d3f,GPU-81aa"}
    assert [v["CUDA_VISIBLE_DEVICES"] for v in device_variables(2, None, chosen, root=root)] == [
        "GPU-5d3f",
        "GPU-81aa",
    ]
    for none in ({"CUDA_VISIBLE_DEVICES": ""}, {"JAX_PLATFORMS": "cpu"}):
        assert device_variables(2, None, none, root=root) == [{}, {}]


def test_gpus_of_amd_are_those_nodes_that_have_vector_units(tmp_path):
    node = "sys/class/kfd/kfd/topology/nodes/{}/properties"
    properties = "cpu_cores_count {}\nsimd_count {}\n"
    files = {node.format(0): properties.format(64, 0)}
    files |= {node.format(n): properties.format(0, 416) for n in range(1, 5)}
    root = listed(tmp_path, files)
    assert device_variables(2, None, {}, root=root) == [
        {"HIP_VISIBLE_DEVICES": "0,1"},
        {"HIP_VISIBLE_DEVICES": "2,3"},
    ]
    with pytest.raises(ClusterError, match=r"4 GPUs \(0, 1, 2, 3\) cannot .* HIP_VISIBLE_DEVICES"):
        device_variables(3, None, {}, root=root)


@pytest.mark.parametrize(
    ("chips", "processes", "bounds", "chips_of_each", "visible"),
    [
        (4, 2, "2,1,1", "1,2,1", ["0,1", "2,3"]),
        (4, 4, "2,2,1", "1,1,1", ["0", "1", "2", "3"]),
        (8, 8, "4,2,1", "1,1,1", ["0", "1", "2", "3", "4", "5", "6", "7"]),
    ],
)
def test_chips_of_a_tpu_host_are_dealt_with_the_grid_of_its_processes(
    tmp_path, chips, processes, bounds, chips_of_each, visible
):
    variables = device_variables(processes, None, {}, root=tpu_host(tmp_path, chips))
    assert [v["TPU_VISIBLE_CHIPS"] for v in variables] == visible
    assert [v["CLOUD_TPU_TASK_ID"] for v in variables] == [str(n) for n in range(processes)]
    assert {v["TPU_PROCESS_BOUNDS"] for v in variables} == {bounds}
    assert {v["TPU_CHIPS_PER_PROCESS_BOUNDS"] for v in variables} == {chips_of_each}
    (addresses,) = {v["TPU_PROCESS_ADDRESSES"] for v in variables}
    assert addresses.split(",") == [f"localhost:{v['TPU_PROCESS_PORT']}" for v in variables]
    assert len({v["TPU_PROCESS_PORT"] for v in variables}) == processes


def test_one_process_has_all_chips_and_other_shares_are_refused(tmp_path):
    root = tpu_host(tmp_path, 8)
    assert device_variables(1, None, {}, changes=True, root=root) == [{}]
    with pytest.raises(ClusterError, match=r"8 TPU chips .* among 3 processes\. Supported"):
        device_variables(3, None, {}, root=root)
    with pytest.raises(ClusterError, match=r"4 processes of a group on several hosts"):
        device_variables(4, None, {"TPU_VISIBLE_CHIPS": "0,1,2,3"}, changes=True, root=root)
