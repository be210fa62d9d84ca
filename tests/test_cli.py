"""The program ``meshwright``: what it prints, and how it ends."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
from click.testing import CliRunner

import meshwright as mw
import meshwright.demo
from meshwright.cli import main
from meshwright.commands import diagnosis
from meshwright.commands.group import Command, Group
from meshwright.testing import run_in_fresh_process
from meshwright.warn import warn

GRID = ["show", "--mesh", "batch=4,model=2"]
KERNEL = [*GRID, "--dims", "784,128", "--layout", "unsharded,model"]


def run(*arguments, **more):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **more)


# The program as a whole


def test_help_and_version_load_nothing_heavy():
    for option in ("--help", "--version"):
        code = f"""
            import sys
            sys.argv = ["meshwright", "{option}"]
            from meshwright.cli import main
            try:
                main()
            except SystemExit as end:
                print(end.code, *sys.modules)
            """
        *_, last = run_in_fresh_process(code).splitlines()
        status, *loaded = last.split()
        assert status == "0"
        assert "meshwright.cli" in loaded
        assert not {"jax", "keras", "numpy", "rich"} & set(loaded)


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    assert all(
        name in result.output
        for name in ("demo", "show", "check", "plan", "dry-run", "launch", "doctor")
    )


def test_version_is_that_of_the_package():
    assert run("--version").output.strip() == f"meshwright, version {mw.__version__}"


def test_a_misspelt_command_suggests_the_nearest():
    result = run("shwo")
    assert result.exit_code == 2
    assert "Did you mean 'show'?" in result.output


def test_the_installed_program_is_this_one():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="meshwright")
    assert script.load() is main


def test_another_backend_is_one_sentence_and_no_traceback():
    program = Path(sys.executable).with_name("meshwright")
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    run = subprocess.run([program, "doctor"], capture_output=True, text=True, env=environment)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: KERAS_BACKEND=tensorflow is set")
    assert "Traceback" not in run.stderr


# Errors


def test_an_error_of_ours_is_one_clean_message():
    result = run(*GRID, "--dims", "784,128", "--layout", "unsharded,modl")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: dim 1 lies on axis 'modl', which the mesh")
    assert "Traceback" not in result.stderr


def test_an_error_in_a_traced_function_has_no_note_on_a_traceback_that_is_not_shown():
    def fail():
        error = mw.ModelError("no forward function")
        error.add_note("  line 1")
        raise error

    result = CliRunner().invoke(Group(commands=[Command("fail", callback=jax.jit(fail))]), ["fail"])
    assert (result.exit_code, result.stderr) == (2, "Error: no forward function\n  line 1\n")


@pytest.mark.parametrize("place", ["before", "after", "environment"])
def test_the_traceback_is_shown_when_it_is_asked_for(place):
    command = [*GRID, "--dims", "784", "--layout", "modl"]
    commands = {
        "before": ["--traceback", *command],
        "after": [*command, "--traceback"],
        "environment": command,
    }
    env = {"MESHWRIGHT_TRACEBACK": "1"} if place == "environment" else {}
    result = run(*commands[place], env=env)
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert "meshwright.errors.LayoutError: dim 0 lies on axis 'modl'" in result.stderr


def test_a_warning_that_no_line_of_the_user_s_has_caused_names_none_of_click_s():
    def by_a_line_here() -> None:
        warn("the second fact.")

    group = Group("odd")
    group.add_command(Command("ours", callback=functools.partial(warn, "the first fact.")))
    group.add_command(Command("theirs", callback=by_a_line_here))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ours = CliRunner().invoke(group, ["ours"])
    assert ours.output == "Warning: the first fact.\n"
    with pytest.warns(mw.MeshwrightWarning, match="the second fact") as theirs:
        CliRunner().invoke(group, ["theirs"])
    assert theirs[0].filename == __file__


def test_all_faults_of_all_tensors_are_told_at_once():
    tensors = ["--tensor", "a:6x3:batch,model", "--tensor", "b:4:unsharded", "--tensor", "c:2:x"]
    result = run(*GRID, *tensors)
    assert result.exit_code == 2
    assert "dim 0 of a (size 6) does not divide over axis 'batch'" in result.stderr
    assert "dim 1 of a (size 3) does not divide over axis 'model'" in result.stderr
    assert "axis 'x', which the mesh (batch=4, model=2) does not have" in result.stderr


# show


def test_show_draws_a_tensor_on_a_mesh():
    result = run(*KERNEL)
    assert result.exit_code == 0, result.output
    assert "mesh  batch=4 down, model=2 across · 8 devices" in result.output
    assert "tensor  784 × 128 · 392 KiB · [unsharded, model]" in result.output
    assert "A: 0, 2, 4, 6" in result.output


def test_show_needs_no_devices():
    code = f"""
        import sys
        from meshwright.cli import main
        try:
            main({KERNEL!r})
        except SystemExit as end:
            print(end.code, "jax" in sys.modules)
        """
    assert run_in_fresh_process(code).endswith("0 False\n")


def test_show_draws_several_tensors_with_names():
    result = run(*GRID, "--tensor", "kernel:784x128:unsharded,model", "--tensor", "b:128:[model]")
    assert result.exit_code == 0, result.output
    assert "kernel  784 × 128" in result.output
    assert "b  128" in result.output
    assert "together: 392 KiB · 196 KiB per device" in result.output


def test_show_compares_layouts_of_one_tensor():
    result = run(
        *GRID, "--dims", "8,8", "--layout", "batch,model", "--layout", "batch+model,unsharded"
    )
    assert result.exit_code == 0, result.output
    assert "tensor 1  8 × 8 · 256 B · [batch, model]" in result.output
    assert "tensor 2  8 × 8 · 256 B · [batch+model, unsharded]" in result.output


@pytest.mark.parametrize(("dims", "layout"), [("", ""), ("", "[]")])
def test_show_draws_a_scalar(dims, layout):
    result = run(*GRID, "--dims", dims, "--layout", layout)
    assert result.exit_code == 0, result.output
    assert "scalar · 4 B · []" in result.output


def test_show_draws_a_mesh_alone():
    result = run(*GRID)
    assert result.exit_code == 0
    assert "batch=4 down" in result.output


def test_show_counts_the_bytes_of_the_dtype():
    assert "784 × 128 · 196 KiB" in run(*KERNEL, "--dtype", "bfloat16").output


def test_show_writes_an_svg(tmp_path):
    path = tmp_path / "new" / "kernel.svg"
    result = run(*KERNEL, "--svg", path, "--title", "A kernel")
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"wrote {path}\n")
    root = ElementTree.parse(path).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title").text == "A kernel"


def test_an_svg_that_cannot_be_written_is_a_clean_error(tmp_path):
    (tmp_path / "file").write_text("")
    result = run(*KERNEL, "--svg", tmp_path / "file" / "kernel.svg")
    assert result.exit_code == 2
    assert "Invalid value for '--svg': cannot write the picture to" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dims", "8"], "--dims and --layout come in pairs; received 1 --dims and 0 --layout"),
        (
            ["--dims", "8,y", "--layout", "batch"],
            "expected sizes, such as 784,128 or 784x128; received '8,y'",
        ),
        (["--tensor", "kernel:8"], "expected name:dims:layout, such as"),
    ],
)
def test_show_says_how_its_arguments_are_written(arguments, message):
    result = run(*GRID, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


def test_show_without_a_mesh_is_an_error():
    result = run("show", "--dims", "8", "--layout", "batch")
    assert result.exit_code == 2
    assert "Missing option '--mesh'" in result.stderr


# doctor


def test_doctor_finds_this_installation_usable():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert f"meshwright {mw.__version__}" in result.output
    assert importlib.metadata.version("jax") in result.output
    assert importlib.metadata.version("keras") in result.output
    assert "8 cpu" in result.output
    assert "process 0 of 1" in result.output
    assert "All required packages are installed and work." in result.output


def test_doctor_refuses_more_processes_than_the_cores_can_run():
    result = run("doctor", "--processes", "100000")
    assert result.exit_code == 2
    assert "100000 processes on" in result.stderr


def test_doctor_speaks_json():
    result = run("doctor", "--json")
    assert result.exit_code == 0
    output = json.loads(result.stdout)
    assert output["usable"] is True
    assert output["command"] is None
    assert [device["id"] for device in output["devices"]] == [d.id for d in jax.devices()]
    assert output["environment"]["KERAS_BACKEND"] == "jax"
    states = {package["name"]: package["state"] for package in output["packages"]}
    assert states["jax"] == states["keras"] == "ok"


@pytest.fixture
def broken_keras(monkeypatch):
    real = importlib.import_module

    def import_module(name, package=None):
        if name == "keras":
            raise AttributeError("module 'tensorflow' has\nno attribute 'x'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)


def without(monkeypatch, *names):
    """Let these distributions seem not to be installed."""
    real = importlib.metadata.version

    def version(name):
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_doctor_reports_a_broken_package(broken_keras):
    result = run("doctor")
    assert result.exit_code == 1
    fault = "keras cannot be imported: AttributeError: module 'tensorflow' has no attribute 'x'"
    assert f"fault: {fault}" in result.output
    assert 'pip install "keras<' in result.output
    assert "All required packages" not in result.output
    assert "Traceback" not in result.output


def test_doctor_gives_one_command_for_all_that_is_missing(monkeypatch):
    without(monkeypatch, "keras", "rich", "optax")
    report = diagnosis.examine()
    assert not report.usable
    assert report.faults == ("keras is not installed", "rich is not installed")
    assert report.command == 'pip install "keras<3.17,>=3.15" "rich>=13.7"'
    assert report.optional_command.startswith('pip install "meshwright[')
    assert "optax" in report.optional_command


def test_doctor_knows_every_requirement_and_extra_of_the_package():
    packages = diagnosis.examine().packages
    names = {package.name for package in packages}
    assert {"jax", "keras", "click", "rich", "pyzmq", "msgpack", "cloudpickle"} <= names
    assert {"ortools", "orbax-checkpoint", "grain", "optax"} <= names
    extras = {package.extra for package in packages if package.extra}
    training = {"grain", "parquet", "optax", "tpu", "cuda", "plan", "checkpoint"}
    assert extras == {*training, "serve", "grpc", "telemetry", "ray", "spark"}
    assert all(package.purpose for package in packages)


def test_doctor_reports_an_optional_package_out_of_range(monkeypatch):
    lines = ["keras<3.17,>=3.15", "optax>=99; extra == 'optax'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    report = diagnosis.examine()
    assert report.usable
    (optax,) = [package for package in report.packages if package.name == "optax"]
    assert optax.fault.endswith("is installed; >=99 is required")
    assert report.optional_command == 'pip install "meshwright[optax]"'


def test_doctor_does_not_ask_devices_of_a_missing_jax(monkeypatch):
    without(monkeypatch, "jax")
    result = run("doctor", "--json")
    assert result.exit_code == 1
    output = json.loads(result.stdout)
    assert output["devices"] == []
    assert output["faults"] == ["jax is not installed"]


def test_doctor_reports_a_version_out_of_range(monkeypatch):
    monkeypatch.setattr(diagnosis, "_requirements", lambda: [("keras>=99", ""), ("jax>=0.10", "")])
    report = diagnosis.examine()
    version = importlib.metadata.version("keras")
    assert report.faults == (f"keras {version} is installed; >=99 is required",)
    assert report.command == 'pip install "keras>=99"'


def test_doctor_reports_devices_that_do_not_start(monkeypatch):
    def devices(platform=None):
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", devices)
    result = run("doctor")
    assert result.exit_code == 1
    assert "fault: JAX cannot start its devices: RuntimeError: Unable to init" in result.output


def test_doctor_warns_of_a_small_cpu_pool(monkeypatch):
    monkeypatch.setattr("meshwright.topology._pool_threads", lambda: 2)
    result = run("doctor")
    assert result.exit_code == 0
    assert "note: 8 CPU devices share a pool of 2 threads" in result.output


def test_doctor_suggests_what_gpus_need_only_where_there_is_one(monkeypatch, tmp_path):
    without(monkeypatch, "jax-cuda13-plugin", "jax-cuda12-plugin", "grain")
    monkeypatch.setattr(diagnosis, "_NVIDIA_DRIVER", tmp_path / "driver")
    report = diagnosis.examine()
    assert "cuda" not in report.optional_command
    assert report.notes == ()
    (tmp_path / "driver").write_text("")
    report = diagnosis.examine()
    assert "cuda" in report.optional_command
    assert "JAX sees no GPU" in report.notes[-1]


def test_doctor_tells_whether_keras_has_the_digits(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    cached = tmp_path / "datasets" / "mnist.npz"
    cached.parent.mkdir()
    cached.write_bytes(b"1234")
    assert str(cached) in diagnosis.examine().data


@pytest.mark.full_for("keras")
@pytest.mark.parametrize("package", ["jax", "keras"])
def test_doctor_survives_a_package_that_is_really_broken(package, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise OSError('half an installation')")
    inherited = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    result = subprocess.run(
        [sys.executable, "-m", "meshwright.cli", "doctor"],
        env={**inherited, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert f"{package} cannot be imported: OSError: half an installation" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


# demo


@pytest.fixture
def demo_calls(monkeypatch):
    """The arguments with which the demo was called."""
    calls = []
    monkeypatch.setattr(meshwright.demo, "main", lambda **options: calls.append(options))
    return calls


def test_demo_leaves_out_what_is_not_said(demo_calls):
    assert run("demo").exit_code == 0
    assert demo_calls == [{"quick": False}]


def test_demo_passes_on_what_is_said(demo_calls):
    result = run("demo", "--data", "m.npz", "--epochs", 2, "--runs", "a,c", "--out", "o", "--quick")
    assert result.exit_code == 0, result.output
    expected = {"data": Path("m.npz"), "epochs": 2, "runs": "a,c", "out": Path("o"), "quick": True}
    assert demo_calls == [expected]


def test_demo_fails_cleanly(monkeypatch):
    def fails(**options):
        raise mw.DataError("there is no file m.npz")

    monkeypatch.setattr(meshwright.demo, "main", fails)
    result = run("demo")
    assert result.exit_code == 2
    assert result.stderr == "Error: there is no file m.npz\n"
