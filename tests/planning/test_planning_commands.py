"""The commands ``meshwright dry-run`` and ``plan``: what they print, and how they end."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

import meshwright as mw
from meshwright.cli import main
from meshwright.commands import planning as planning_commands
from meshwright.planning import dry_run as dry_runs
from meshwright.testing import run_in_fresh_process


@pytest.fixture(autouse=True, scope="module")
def devices_of_the_other_tests() -> None:
    """Started before the command can ask for one alone in this process."""
    mw.create_mesh({"batch": 8})


JOB = """
import jax.numpy as jnp, keras, numpy as np, optax
import meshwright as mw


def build():
    model = keras.Sequential(
        [keras.Input([16]), keras.layers.Dense(32, name="hidden"), keras.layers.Dense(4)],
        name="net",
    )
    model.compile("adam", "mse")
    batch = np.zeros([16, 16], "float32"), np.zeros([16, 4], "float32")
    return model, batch, {"hidden/kernel": [None, "model"]}


def program():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    return mw.jax_program(loss, {"w": np.ones([8, 4])}, optax.adam(0.1)), {"x": np.eye(16, 8)}


def uncompiled():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(2)]), (np.zeros([8, 4]),)


def undecided():
    def loss(params, batch):
        if jnp.sum(batch["x"]) > 0:  # the value of a batch
            return jnp.mean(batch["x"] @ params["w"])
        return 0.0

    return mw.jax_program(loss, {"w": np.ones([8, 4])}, optax.adam(0.1)), {"x": np.eye(16, 8)}


def broken():
    return {}["no such key"]


def nothing():
    return "no model", (np.zeros([8, 4]),)
"""
MESH = ["--mesh", "batch=4,model=2"]


def run(*arguments):
    return CliRunner().invoke(main, ["dry-run", *map(str, arguments)])


@pytest.fixture
def job(user_module):
    return user_module("planned_job", JOB)


dry_run_hardware = []  # of each dry run that was asked for


@pytest.fixture
def requests(monkeypatch):
    """What dry runs were asked for; none is made."""
    calls = []

    def dry_run(model, batch, *, strategy, target, timeout_s, compile, hardware):
        assert compile
        dry_run_hardware.append(hardware)
        calls.append((model, batch, strategy, target, timeout_s))
        memory = dry_runs.Memory(6, 12, 1, 1, 6, peak_bytes=2048, available_bytes=available[0])
        return dry_runs.DryRun("net", target, strategy.mesh.axes, memory)

    dry_run_hardware.clear()
    available = [1024]
    calls_and_memory = calls, available
    monkeypatch.setattr(planning_commands, "dry_run", dry_run)
    return calls_and_memory


@pytest.mark.full
def test_the_report_is_printed_without_any_device(job):
    out = run_in_fresh_process(
        """
        import sys
        sys.argv = ["meshwright", "dry-run", "planned_job:build", "--target", "cpu:8"]
        sys.argv += ["--mesh", "batch=4,model=2", "--batch-size", "64", "--no-cache"]
        from meshwright.cli import main
        try:
            main()
        except SystemExit as end:
            import jax
            print(end.code, jax.device_count())
        """
    )
    assert out.startswith("net on cpu:8 (batch=4, model=2): ")
    assert re.search(r"parameters +1,680 ", out)  # 16 x 16 + 32 + 32 x 4 + 4 floats
    assert re.search(r"inputs +1,280 ", out)  # 16 rows of 20 floats
    assert "all-reduce" in out
    assert out.endswith("0 1\n")


def test_it_ends_with_1_only_if_the_step_does_not_fit(job, requests):
    _, available = requests
    small = run("planned_job:build", "--target", "cpu:8", *MESH)
    assert small.exit_code == 1
    assert "does not fit, by 1 KiB" in small.stdout
    for enough in (4096, None):
        available[0] = enough
        assert run("planned_job:build", "--target", "cpu:8", *MESH).exit_code == 0


def test_options_reach_the_strategy(job, requests):
    calls, _ = requests
    layouts = ["--layout", "dense/kernel:model,unsharded;dense/bias:unsharded"]
    how = ["--zero", 2, "--batch-size", 64, "--option", "accumulate=2", "--timeout", 5]
    run("planned_job.py:build", "--target", "v5e:2x4", *MESH, *layouts, *how)
    [(model, (x, y), strategy, target, timeout_s)] = calls
    assert model.name == "net"
    assert (x.shape, y.shape) == ((32, 16), (32, 4))  # half of the rows at once
    assert [rule.pattern for rule in strategy.placement.layouts] == [
        "dense/kernel",
        "dense/bias",
        "hidden/kernel",
    ]
    assert (strategy.placement.zero, strategy.how.accumulate) == (2, 2)
    assert (str(target), timeout_s) == ("v5e:2x4", 5.0)


def test_a_step_is_costed_by_measured_rates_or_by_a_file(job, requests, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(mw.hardware_of("v5e").to_toml())
    for options in ([], ["--hardware", "measured"], ["--hardware", path]):
        assert run("planned_job:build", "--target", "h100:8", *MESH, *options).exit_code == 1
    measured = mw.hardware_of("h100", measured=True)
    assert dry_run_hardware == [None, measured, mw.hardware_of("v5e")]


def test_without_a_mesh_all_devices_share_the_batch(job, requests):
    calls, _ = requests
    run("planned_job:program", "--target", "v4:2x2x2")
    [(_, _, strategy, _, _)] = calls
    assert strategy.mesh.axes == (("batch", 8),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["build", "--target", "cpu"],
            "such as 'v5e:4x4', 'v5e:2x(4x4)', 'h200:8' or 'cpu:8'; received 'cpu'",
        ),
        (["build", "--target", "v9:2x2"], "unknown kind of target 'v9'"),
        (
            ["build", "--target", "cpu:4", *MESH],
            "over 8 devices (batch=4, model=2), and the target",
        ),
        (["build", "--target", "cpu:8", "--mesh", "batch"], "batch"),
        (["build", "--target", "h100:12", *MESH], "laid out over 8 devices"),
        (
            ["build", "--target", "cpu:8", "--check", "no.json"],
            "cannot read a dry-run lock from 'no.json'",
        ),
        (["build", "--target", "cpu:8", *MESH, "--batch-size", "6"], "does not divide over axis"),
        (
            ["build", "--target", "cpu:8", *MESH, "--batch-size", 8, "--option", "accumulate=3"],
            "a batch of 8 rows does not divide into 3 micro-batches; use --batch-size 6.",
        ),
        (
            ["build", "--target", "cpu:8", *MESH, "--layout", "kernel"],
            "Invalid value for '--layout': expected pattern:layout",
        ),
        (
            ["build", "--target", "cpu:8", *MESH, "--option", "accumulate=two"],
            "accumulate='two': say how many micro-batches",
        ),
        (["build", "--target", "cpu:8", *MESH, "--option", "zeroo=1"], "argument 'zeroo'"),
        (["build", "--target", "cpu:8", *MESH, "--option", "layouts=1"], "--layout"),
        (["build", "--target", "cpu:8", "--layout", "hidde:batch"], "'model'"),
        (["build", "--target", "v5e:2x4", *MESH, "--hardware", "measured"], "no rates of v5e were"),
        (
            ["build", "--target", "cpu:8", "--hardware", "no.toml"],
            "expected 'measured' or a file of meshwright calibrate; received 'no.toml'.",
        ),
        (
            ["build", "--target", "cpu:8", "--measure", "--hardware", "measured"],
            "--hardware: not supported with --measure, which measures this machine.",
        ),
        (["uncompiled", "--target", "cpu:8"], "is not compiled: call model.compile"),
        (
            ["nothing", "--target", "cpu:8"],
            "must return a compiled Keras model or a Program; received a str",
        ),
        (["biuld", "--target", "cpu:8"], "has no function 'biuld'"),
        (
            ["broken", "--target", "cpu:8"],
            ", in broken): KeyError: 'no such key' (--traceback shows all of it)\n  planned",
        ),
        (["undecided", "--target", "cpu:8"], ", in undecided.<locals>.loss): Tracer"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(job, arguments, message):
    name, *others = arguments
    result = run(f"planned_job:{name}", *others)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


MANY = ["--mesh", "batch=3", "--layout", "hiddn.*kernel:unsharded,zzz", "--batch-size", "7"]


@pytest.mark.parametrize(
    ("build", "messages"),
    [
        ("broken", ["KeyError: 'no such key'"]),  # where nothing is built, no more can be said
        (
            "build",
            [
                "layout 'hiddn.*kernel' names axis 'zzz'",
                "'hiddn.*kernel' matches no path. The nearest: 'hidden/kernel'",
            ],
        ),
        ("program", ["a batch of 7 rows does not divide into 2", "matches no path"]),
    ],
)
def test_the_faults_of_a_command_are_said_at_once(job, build, messages):
    options = MANY if build == "build" else [*MANY, "--option", "accumulate=2"]
    options = [text.replace("zzz", "batch") if build == "program" else text for text in options]
    result = run(f"planned_job:{build}", "--target", "cpu:8", *options)
    assert result.exit_code == 2
    said = ["over 3 devices (batch=3), and the target cpu:8 has 8. Make a mesh of 8", *messages]
    assert [message for message in said if message not in result.stderr] == []
    assert "Traceback" not in result.output


def test_the_planner_says_the_faults_of_a_command_at_once(job):
    words = ["plan", "planned_job:nothing", "--target", "a100:8", "--mesh", "batch=16"]
    words += ["--rows", "1,8", "--hardware", "measured"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    said = [
        "--rows need a plan for serving",
        "takes 16 devices, and a100:8 has 8",
        "no rates of a100 were measured",
        "build() must return a compiled Keras model",
    ]
    assert [message for message in said if message not in result.stderr] == []


def test_the_planner_names_the_line_that_cannot_be_traced(job):
    result = CliRunner().invoke(main, ["plan", "planned_job:undecided", "--target", "h100:8"])
    assert result.exit_code == 2
    line = 1 + JOB.split("\n").index('        if jnp.sum(batch["x"]) > 0:  # the value of a batch')
    assert f"the step of 'program' cannot be traced (planned_job.py:{line}, in" in result.stderr


def test_what_compiles_for_tpus_is_asked_for_by_one_command(job, monkeypatch):
    actual = importlib.util.find_spec

    def without(name, *more):
        return None if name == "libtpu" else actual(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = run("planned_job:build", "--target", "v5e:2x4", *MESH)
    assert result.exit_code == 2
    assert "pip install 'meshwright[tpu]' adds it" in result.stderr


def test_a_plan_is_kept_and_what_gets_worse_fails(job, requests):
    _, available = requests
    available[0] = 4096
    to = ["planned_job:build", "--target", "cpu:8", *MESH]
    assert run(*to, "--save", "plan.json").exit_code == 0
    checks = run(*to, "--check", "plan.json")
    assert checks.exit_code == 0
    assert "nothing got worse (written for cpu:8, net)" in checks.stdout
    text = (job / "plan.json").read_text()
    (job / "plan.json").write_text(text.replace('"peak_bytes": 2048', '"peak_bytes": 2000'))
    grown = run(*to, "--check", "plan.json")
    assert grown.exit_code == 1
    assert "1 thing got worse than the lock file" in grown.stdout
    assert "worse   memory      peak: 1.95 KiB -> 2 KiB (+2.4%)" in grown.stdout
    assert run(*to, "--check", "plan.json", "--tolerance", "0.03").exit_code == 0
    other = run("planned_job:build", "--target", "v5e:2x4", *MESH, "--check", "plan.json")
    assert other.exit_code == 2
    assert "for the target cpu:8, and this dry run for v5e:2x4" in other.stderr


def test_a_report_of_what_does_not_fit_is_no_error(job, requests, monkeypatch):
    def refuse(*_, strategy, target, **__):
        memory = dry_runs.Memory(6, 12, 1, 1, 6)
        report = dry_runs.DryRun("net", target, strategy.mesh.axes, memory)
        return replace(report, refusal="RESOURCE_EXHAUSTED: Used 40G of 16G hbm")

    monkeypatch.setattr(planning_commands, "dry_run", refuse)
    result = run("planned_job:build", "--target", "v5e:2x4", *MESH)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "Used 40G of 16G hbm" in result.stdout


# The planner


def test_the_planner_is_asked_and_its_plan_is_kept(job, tmp_path):
    path = tmp_path / "plan.json"
    to = ["--target", "h100:8", "--hardware", "measured", "--save", str(path)]
    result = CliRunner().invoke(main, ["plan", "planned_job:build", *to])
    assert result.exit_code == 0, result.output
    assert "by the constants of h100, measured" in " ".join(result.output.split())
    loaded = mw.Plan.load(path)
    assert str(loaded) in result.output
    assert loaded.num_inputs == 1


@pytest.mark.full_for("arguments0-no layout keeps within 1000 B on h100:8")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory-limit", "1kB"], "no layout keeps within 1000 B on h100:8"),
        (["--memory-limit", "14 GG"], "'--memory-limit': expected a number of bytes above zero"),
        (["--mesh", "batch=16"], "takes 16 devices, and h100:8 has 8"),
        (
            ["--save", "planned_job.py/folder.json"],
            "'--save': cannot write the plan to 'planned_job.py/folder.json'",
        ),
    ],
)
def test_what_the_planner_cannot_do_is_one_sentence(job, arguments, says):
    result = CliRunner().invoke(
        main, ["plan", "planned_job:build", "--target", "h100:8", *arguments]
    )
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_a_file_of_one_kind_is_refused_where_the_other_is_expected(job):
    to = ["planned_job:build", "--target", "h100:8"]
    saved = CliRunner().invoke(main, ["plan", *to, "--save", "new/plan.json"])
    assert saved.exit_code == 0, saved.output
    result = run(*to, "--check", "new/plan.json")
    assert result.exit_code == 2
    words = " ".join(result.stderr.split())
    assert "'--check': 'new/plan.json': not a readable dry-run lock: expected a dry-run" in words
    assert "received a plan (written by `meshwright plan --save` or Plan.save)" in words


def test_the_axis_of_the_batch_is_named_with_the_option_that_sets_it(job, requests):
    wrong = run("planned_job:program", "--target", "cpu:8", "--mesh", "data=4,model=2")
    assert wrong.exit_code == 2
    assert "batch='batch' (the default) names axis 'batch'" in wrong.stderr
    assert "--option batch=data" in wrong.stderr
    to = ["planned_job:program", "--target", "cpu:8", "--mesh", "data=4,model=2"]
    assert run(*to, "--option", "batch=data").exit_code == 1  # it is asked, and does not fit


def test_it_says_that_it_compiles_once_module_and_mesh_are_right(job):
    wrong = [("planned_job:absent",), ("planned_job:build", "--mesh", "batch=3")]
    for arguments in wrong:
        assert "compiling" not in run(*arguments, "--target", "cpu:8").stderr
    right = run("planned_job:build", "--target", "cpu:8", *MESH, "--no-cache")
    assert right.exit_code == 0
    assert right.stderr.count("compiling for cpu:8 ...") == 1


# Measuring a machine


def test_what_calibrate_writes_is_hardware_of_this_machine(tmp_path):
    path = tmp_path / "here.toml"
    result = CliRunner().invoke(main, ["calibrate", "--target", "cpu:1", "--save", str(path)])
    assert result.exit_code == 0, result.output
    hardware = mw.load_hardware(path)
    assert hardware.name == "cpu:1"
    assert hardware.rate("product", 1e6)


def test_a_machine_that_is_elsewhere_is_not_measured(tmp_path):
    path = tmp_path / "here.toml"
    result = CliRunner().invoke(main, ["calibrate", "--target", "h100:1", "--save", str(path)])
    assert result.exit_code == 2
    assert "h100:1 cannot be measured here: JAX has" in result.stderr
    assert not path.exists()
