"""Files for platforms: complete, parsed by their own formats, quoted, and never replaced."""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.commands.serve import options_of
from meshwright.errors import ServingError
from meshwright.serving.platforms import PLATFORMS, Deployment, files_for

ARGUMENTS = ("runs/it's $HOME", "--model", "train:build", "--mesh", "model=4")
DEPLOYMENT = Deployment("mnist", ARGUMENTS, "0.1.0", devices=4)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_file_parses_as_what_it_is(platform):
    for name, text in files_for(platform, DEPLOYMENT).items():
        assert text.endswith("\n"), name
        if name.endswith((".yaml", "MLmodel")):
            assert isinstance(yaml.safe_load(text), dict)
        elif name.endswith(".py"):
            ast.parse(text)
        elif name == "Containerfile" and "ENTRYPOINT" in text:
            words = json.loads(text.partition("ENTRYPOINT ")[2])
            assert words[: len(ARGUMENTS) + 2] == ["meshwright", "serve", *ARGUMENTS]
            assert "0.0.0.0" in words


def test_a_container_keeps_what_is_compiled_where_it_is_looked_for():
    files = files_for("compose", DEPLOYMENT)
    lines = files["Containerfile"].splitlines()
    assert any("MESHWRIGHT_CACHE=/home/server/cache" in line for line in lines)
    assert "JAX_COMPILATION_CACHE_DIR" not in files["Containerfile"]
    (warming,) = (json.loads(line[4:]) for line in lines if line.startswith("RUN ["))
    assert warming == ["meshwright", "serve", *ARGUMENTS, "--warm-up"]
    assert lines.index("USER server") < next(n for n, x in enumerate(lines) if "warm-up" in x)
    compose = yaml.safe_load(files["compose.yaml"])
    assert "compiled" in compose["volumes"]
    service = compose["services"]["mnist"]
    assert service["volumes"] == ["compiled:/home/server/cache"]
    assert service["tmpfs"] == ["/tmp"]
    assert "keys*" not in files["Containerfile.dockerignore"].replace("api_keys*", "")


@pytest.mark.full
@pytest.mark.parametrize("variable", ["MESHWRIGHT_CACHE", "JAX_COMPILATION_CACHE_DIR"])
def test_warming_up_keeps_what_a_small_model_compiles(variable, tmp_path):
    import keras

    x = keras.Input([2])
    keras.Model(x, keras.layers.Dense(1)(x)).save(tmp_path / "small.keras")
    words = ["serve", str(tmp_path / "small.keras"), "--buckets", "1", "--warm-up"]
    others = ("JAX_", "MESHWRIGHT_CACHE")  # those of all tests
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env[variable] = str(tmp_path / "cache")
    result = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("compiled: Server(small")
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("jit_*-cache"))


OF_KUBERNETES = {
    "kserve": "inference_service.yaml",
    "kubeflow": "inference_service.yaml",
    "knative": "service.yaml",
}


@pytest.mark.parametrize("platform", OF_KUBERNETES)
def test_manifests_fulfil_the_published_schemas(platform):
    document = yaml.safe_load(files_for(platform, DEPLOYMENT)[OF_KUBERNETES[platform]])
    path = Path(__file__).parent / "schemas" / f"{document['kind']}.json.gz"
    schema = json.loads(gzip.decompress(path.read_bytes()))
    jsonschema.validate(document, schema)
    spec = document["spec"]
    pod = spec["predictor"] if platform != "knative" else spec["template"]["spec"]
    pod["containers"][0]["readinessProb"] = {}
    with pytest.raises(jsonschema.ValidationError, match="readinessProb"):
        jsonschema.validate(document, schema)


def test_mlflow_gets_what_its_scoring_server_imports():
    lines = files_for("mlflow", DEPLOYMENT)["requirements.txt"].split()
    assert lines == ["meshwright[serve,checkpoint]==0.1.0", "mlflow-skinny>=3.0", "pandas>=2"]


def test_a_shell_reads_the_words_as_they_were():
    import shlex

    line = files_for("sagemaker", DEPLOYMENT)["serve"].splitlines()[-1]
    assert tuple(shlex.split(line)[3:8]) == ARGUMENTS


def test_probes_ask_for_readiness_on_the_port_that_is_served():
    spec = yaml.safe_load(files_for("kserve", DEPLOYMENT)["inference_service.yaml"])
    (container,) = spec["spec"]["predictor"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mnist").mkdir(parents=True)
    (tmp_path / "train.py").write_text("def build(): ...\n")
    return tmp_path


def test_memory_follows_the_size_of_the_weights(project, monkeypatch):
    sparse = project / "large.keras"
    with sparse.open("wb") as file:
        file.truncate(10 << 30)
    words = ["serve", "large.keras", "--write", "knative", "--to", "out"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    (container,) = yaml.safe_load((project / "out" / "service.yaml").read_text())["spec"][
        "template"
    ]["spec"]["containers"]
    assert container["resources"]["requests"]["memory"] == "23Gi"


def test_the_command_writes_the_words_that_it_was_called_with(project):
    words = ["runs/mnist", "--model", "train:build", "--mesh=model=2", "--port", "9"]
    result = CliRunner().invoke(main, ["serve", *words, "--write", "ray", "--to", "out"])
    assert result.exit_code == 0, result.output
    assert result.output.split() == [f"out/{name}" for name in PLATFORMS["ray"]]
    text = (project / "out" / "app.py").read_text()
    assert '["runs/mnist", "--model", "train:build", "--mesh=model=2"]' in text
    again = CliRunner().invoke(main, ["serve", *words, "--write", "ray", "--to", "out"])
    assert again.exit_code == 2
    assert "exists already and is not replaced" in again.output


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(project):
    words = ["serve", "runs/mnist", "--model", "train:build", "--write", "ray", "--to"]
    result = CliRunner().invoke(main, [*words, "train.py/out"])
    assert result.exit_code == 2
    expected = "Error: cannot write the files for ray to 'train.py/out/app.py': "
    assert result.output.startswith(expected), result.output


def test_words_become_options(project):
    words = ["runs/mnist", "--model", "train:build", "--mesh", "model=2", "--buckets", "1,8"]
    options = options_of([*words, "--max-body", "1MiB", "--precision", "int8", "--finite"])
    assert (options["buckets"], options["max_body"], options["finite"]) == ((1, 8), 1 << 20, True)
    options = options_of([*words, "--pad-value=-1", "--in-flight", "1"])
    assert (options["pad_value"], options["in_flight"]) == (-1, 1)


def test_a_config_file_gives_options(project):
    (project / "serve.toml").write_text('mesh = "model=2"\n[serve]\nport = 9000\nmax-rows = 8\n')
    options = options_of(["runs/mnist", "--model", "train:build", "--config", "serve.toml"])
    assert (options["port"], options["max_rows"], options["mesh"].size) == (9000, 8, 2)


def test_names_that_platforms_refuse_are_refused():
    with pytest.raises(ServingError, match="lowercase"):
        Deployment("My_Model", (), "0.1.0")
    with pytest.raises(ServingError, match="unknown platform 'heroku'"):
        files_for("heroku", DEPLOYMENT)
