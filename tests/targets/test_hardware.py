"""Chips: every number has its source, and a file of one's own is read or told its faults."""

from __future__ import annotations

import dataclasses

import pytest

import meshwright as mw
from meshwright.targets.hardware import RATES, Hardware, Link, hardware_of, load_hardware
from meshwright.targets.target import Target

CHIPS = ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200", "cpu"]
GIB = 1 << 30


def numbers_of(chip: Hardware) -> list[str]:
    plain = (
        *("memory_bytes", "memory_bandwidth_bytes_per_s", "on_chip_bytes"),
        "devices_per_node",
    )
    results = [name for name in plain if getattr(chip, name) is not None]
    results += ["peak_flops_per_s"] if chip.peak_flops_per_s else []
    for link in chip.links:
        known = [name for name in ("bytes_per_s", "latency_s") if getattr(link, name) is not None]
        results += [f"links.{link.kind}.{name}" for name in known]
    return results


@pytest.mark.parametrize("name", CHIPS)
def test_every_number_has_a_source_and_every_source_a_number(name):
    chip = hardware_of(name)
    assert chip.name == name
    assert sorted(numbers_of(chip)) == sorted(number for number, _ in chip.sources)
    assert all(len(source) > 20 for _, source in chip.sources)
    hash(chip)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("target", "chip_gib", "chip_tflops"),
    [
        *(("v2:2x2", 16, 46), ("v3:2x2", 32, 123), ("v4:2x2x1", 32, 275), ("v5e:2x2", 16, 197)),
        *(("v5p:2x2x1", 95, 459), ("v6e:2x2", 32, 918), ("tpu7x:2x2x1", 192, 2307)),
    ],
)
def test_a_chip_that_is_two_devices_is_shared_between_them(target, chip_gib, chip_tflops):
    chip = hardware_of(target)
    devices_per_chip = Target.of(target).num_devices // 4
    assert chip.memory_bytes * devices_per_chip == chip_gib * GIB
    assert chip.peak("bfloat16") * devices_per_chip == pytest.approx(chip_tflops * 1e12)


def test_a_target_a_text_and_a_name_are_the_same_chip():
    assert hardware_of("V5P:2x2x2") == hardware_of("v5p") == hardware_of(Target.of("v5p:4x4x4"))


@pytest.mark.parametrize(
    ("name", "near"), [("h10:8", "h100"), ("v5:4x4", "v5e"), ("tpu7", "tpu7x")]
)
def test_an_unknown_chip_is_told_its_neighbours(name, near):
    with pytest.raises(mw.TargetError, match=rf"The nearest are .*{near}.*load_hardware"):
        hardware_of(name)


def test_a_name_like_no_other_is_told_all():
    with pytest.raises(mw.TargetError, match=r"'quantum'\. Known are v2, .*cpu"):
        hardware_of("quantum:8")


def test_measured_rates_stand_beside_what_is_published():
    published, measured = hardware_of("h100:8"), hardware_of("h100:8", measured=True)
    assert (published.rates, published.call_s) == ((), None)
    assert {kind for kind, _ in measured.rates} < set(RATES)
    assert "one H100" in measured.source("rates")
    for same in ("links", "memory_bytes", "peak_flops_per_s"):
        assert getattr(measured, same) == getattr(published, same)
    assert measured.source("memory_bytes") == published.source("memory_bytes")
    for _, points in measured.rates:  # larger work is faster, and no product exceeds its peak
        assert points[0][1] < points[-1][1]
    assert measured.rate("product_bfloat16", 1e15) < measured.peak("bfloat16")
    assert measured.rate("memory", 1e12) < measured.memory_bandwidth_bytes_per_s
    with pytest.raises(
        mw.TargetError, match=r"no rates of v5e .* only of h100, h200.*mw\.calibrate\('v5e:4x4'"
    ):
        hardware_of("v5e:4x4", measured=True)


@pytest.mark.parametrize("name", CHIPS)
def test_what_is_written_is_read_again(name, tmp_path):
    path = tmp_path / "chip.toml"
    path.write_text(hardware_of(name).to_toml())
    assert load_hardware(path) == hardware_of(name)


def test_a_chip_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        name = "mine"
        memory_bytes = 24e9
        peak_flops_per_s = { bfloat16 = 100e12 }
        [links."my bus"]
        pattern = "shared"
        bytes_per_s = 10e9
        [rates.product]
        1000 = 1e9
        200 = 1e8
        """
    )
    mine = load_hardware(str(path))
    assert mine == Hardware(
        "mine",
        (("bfloat16", 100e12),),
        24_000_000_000,
        links=(Link("my bus", "shared", 10e9),),
        rates=(("product", ((200.0, 1e8), (1000.0, 1e9))),),
    )
    assert mine.peak("float32") is None
    assert mine.link("nvlink") is None
    path.write_text(mine.to_toml())
    assert load_hardware(path) == mine


def test_every_fault_of_a_file_is_told_at_once(tmp_path):
    path = tmp_path / "faulty.toml"
    path.write_text(
        """
        memory_byte = 5
        memory_bandwidth_bytes_per_s = -1.0
        peak_flops_per_s = { bfloat16 = "fast" }
        [links.bus]
        pattern = "star"
        latency = 1.0
        bytes_per_s = true
        [links]
        odd = 3
        [sources]
        memory_bytes = 4
        [rates.convolutions]
        1000 = 1.0
        [rates.product]
        0 = 1.0
        10 = -1.0
        """
    )
    with pytest.raises(mw.TargetError) as failure:
        load_hardware(path)
    words = str(failure.value)
    for fault in (
        "unknown key 'memory_byte'. Did you mean 'memory_bytes'?",
        "'memory_bandwidth_bytes_per_s' must be a number above zero; received -1.0.",
        "'peak_flops_per_s.bfloat16' must be a number above zero; received 'fast'.",
        "'links.bus.pattern' must be one of ('ring', 'switch', 'shared'); received 'star'.",
        "unknown key 'links.bus.latency'. Did you mean 'latency_s'?",
        "'links.bus.bytes_per_s' must be a number above zero; received True.",
        "'links.odd' must be a table, [links.odd]; received 3.",
        "'sources.memory_bytes' must be a text; received 4.",
        "unknown key 'rates.convolutions'. Did you mean 'convolution'?",
        "'rates.product' must have numbers above zero as its sizes; received '0'.",
        "'rates.product.10' must be a number above zero; received -1.0.",
        "'name' is missing: a text.",
    ):
        assert fault in words
    assert words.count("\n- ") == 12


@pytest.mark.parametrize("text", ["name = ", None])
def test_a_file_that_cannot_be_read(text, tmp_path):
    path = tmp_path / "chip.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(mw.TargetError, match=r"no hardware can be read from .*chip\.toml"):
        load_hardware(path)


def test_tables_that_are_none_and_a_name_that_is_none(tmp_path):
    path = tmp_path / "chip.toml"
    path.write_text("name = 3\nlinks = 4\nsources = 5\npeak_flops_per_s = 6\n")
    with pytest.raises(mw.TargetError) as failure:
        load_hardware(path)
    assert str(failure.value).count("\n- ") == 4
