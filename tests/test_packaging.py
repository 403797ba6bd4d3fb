"""Installation: what is declared, what is pinned, and that nothing needs a compiler, apex or a GPU."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from launching import facts, training_lines
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for folder in (".", "tools", "examples", "benchmarks")
                 for path in (ROOT / folder).glob("*.py") if path.name != "setup.py")
SHELL_SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in
                       [ROOT / ".ci/run", *(path for folder in ("tests", "tools", "examples")
                                            for path in (ROOT / folder).rglob("*.sh"))])
#: versions that are dates: no next one can be ruled out
DATED = {"regex"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def run(*command, cwd=ROOT, **environ):
    return subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True, check=False,
                          timeout=300, env={**os.environ, **{name: str(value) for name, value in environ.items()}})


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """Environment of a machine without compilers, without apex and with no visible GPU."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "bin").mkdir()
    for tool in ("env", "uname"):
        (folder / "bin" / tool).symlink_to(shutil.which(tool))
    (folder / "modules" / "apex").mkdir(parents=True)
    (folder / "modules" / "apex" / "__init__.py").write_text("raise ImportError('no apex here')\n")
    return {"PATH": folder / "bin", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'modules'}",
            "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


@pytest.fixture(scope="session")
def declared(tmp_path_factory):
    """extra ("" for none) -> requirements, from the metadata that setup.py writes."""
    folder = tmp_path_factory.mktemp("metadata")
    done = run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder)
    assert done.returncode == 0, done.stderr
    extras, extra = {"": []}, ""
    for line in (folder / "megatron_bitfit.egg-info" / "requires.txt").read_text().split("\n"):
        if line.startswith("["):
            extra = line.strip("[]")
            extras[extra] = []
        elif line:
            extras[extra].append(Requirement(line))
    return extras


@pytest.fixture(scope="session")
def pins():
    """All lines of constraints.txt, as requirements."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(pins, python):
    """distribution -> exact version for one Python."""
    versions = {}
    for pin in pins:
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            name = canonicalize_name(pin.name)
            assert name not in versions, f"{name} is pinned twice for Python {python}"
            specifier, = pin.specifier
            assert specifier.operator == "==" and "*" not in specifier.version, f"{pin} is no exact version"
            versions[name] = specifier.version
    return versions


def imports_of(*folders):
    """Top-level modules that Python files below these folders import, in functions too."""
    names = set()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")) if folder != "." else (ROOT).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


# --- without compiler, apex, GPU --------------------------------------------------------------


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "__main__" in (ROOT / script).read_text()])
def test_help_prints_on_a_bare_machine(script, bare):
    """deepspeedai/DeepSpeed#943"""
    done = run(sys.executable, script, "--help", **bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:") and not done.stderr.strip()


def test_megatron_alone_loads_no_heavy_library(bare):
    done = run(sys.executable, "-c", "import sys, megatron; print(*sys.modules)", **bare)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "deepspeed", "transformers", "numpy"} & set(done.stdout.split())


def test_every_module_imports_on_a_bare_machine(bare):
    code = ("import importlib, pkgutil, megatron\n"
            "names = [m.name for m in pkgutil.walk_packages(megatron.__path__, 'megatron.')]\n"
            "names.remove('megatron.data.helpers') if 'megatron.data.helpers' in names else None\n"
            "for name in names: importlib.import_module(name)\n"
            "print(len(names))")
    done = run(sys.executable, "-c", code, **bare)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 30


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    """What a build needs, away from the repository."""
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        for file in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / file, folder)
        shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        return folder
    return make


def test_a_build_without_a_compiler_succeeds_with_a_note(copy, bare):
    folder = copy("no_compiler")
    done = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=folder,
               **{**bare, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: megatron.data.helpers was not built" in done.stdout and "NumPy path" in done.stdout
    assert not list(folder.rglob("*.so"))
    said = run(sys.executable, "-c", "from megatron.data.index_arrays import HAVE_HELPERS; print(HAVE_HELPERS)",
               cwd=folder, PYTHONPATH=folder)
    assert said.stdout.strip() == "False", said.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") and Path(sysconfig.get_path("include"), "Python.h").exists()),
                    reason="needs a C++ compiler and Python's headers: there is nothing to build with")
def test_a_build_with_a_compiler_gives_the_helper(copy):
    folder = copy("compiler")
    done = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    said = run(sys.executable, "-c", "from megatron.data import helpers; print(helpers.__file__)",
               cwd=folder, PYTHONPATH=folder)
    assert said.stdout.strip().startswith(str(folder)), said.stderr


# --- declarations -----------------------------------------------------------------------------


def test_every_declared_dependency_has_bounds_and_an_exact_pin_within_them(declared, pins):
    requirements = [requirement for extra in declared.values() for requirement in extra]
    assert len(declared[""]) >= 5 and set(declared) >= {"test", "quickstart", "dev"}
    for requirement in requirements:
        operators = {specifier.operator for specifier in requirement.specifier}
        wanted = {">="} if requirement.name in DATED else {">=", "<"}
        assert operators == wanted, f"{requirement} has other bounds than {wanted}"
        for python in PYTHONS:
            version = pinned(pins, python).get(canonicalize_name(requirement.name))
            assert version, f"{requirement.name} is not in constraints.txt for Python {python}"
            assert requirement.specifier.contains(version), f"{requirement} excludes its pin {version}"


def test_torch_is_pinned_first_and_for_every_machine(pins):
    assert str(pins[0]) == "torch==2.13.0", "a local version such as +cpu fits one kind of machine only"
    assert not [pin for pin in pins if "+" in str(pin.specifier)]


def test_what_is_declared_is_imported_and_what_is_imported_is_declared(declared):
    used = imports_of("megatron", "tools", ".")
    names = {canonicalize_name(requirement.name) for requirement in declared[""]}
    assert names <= used | {"tensorboard"}, f"declared but not used: {names - used}"
    assert re.search(r"^from torch.utils.tensorboard|import SummaryWriter",
                     (ROOT / "megatron" / "tensorboard.py").read_text(), re.M), "tensorboard is not used"
    optional = {"apex", "bitsandbytes"}
    ours = {"megatron", *(Path(script).stem for script in SCRIPTS)}
    foreign = used - set(sys.stdlib_module_names) - ours - optional
    foreign -= {"pybind11", "setuptools"}  # setup.py's own; pyproject.toml names them for the build
    assert foreign <= names, f"used but not declared: {foreign - names}"


# --- shell scripts ----------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_script_parses(script):
    done = run("bash", "-n", script)
    assert done.returncode == 0, done.stderr


def sourced(place, line, **environ):
    """Run ``line`` after sourcing the set-up script in ``place``."""
    return run("bash", "-euc", f". '{place}/tools/setup_env.sh'; {line}", cwd=place,
               **{"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHON": "", **environ})


@pytest.fixture
def place(tmp_path):
    """A repository to set up in, its path with a space, and a pip that only takes notes."""
    folder = tmp_path / "a place"
    (folder / "tools").mkdir(parents=True)
    (folder / "megatron" / "data").mkdir(parents=True)
    for file in ("tools/setup_env.sh", "constraints.txt", "setup.py", "pyproject.toml", "megatron/data/helpers.cpp",
                 "megatron/__init__.py", "megatron/data/__init__.py", "megatron/data/index_arrays.py"):
        shutil.copy(ROOT / file, folder / file)
    return folder


def active_environment(folder, torch=True, works=True):
    """A folder that looks like an environment: python is ours, but pip writes its arguments to a file."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"""#!/bin/bash
if [ "$1 $2" = "-m pip" ]; then echo "$@" >> "{folder}/pip.log"; exit {0 if works else 1}; fi
case "$*" in *'m.version("torch")'*) exit {0 if torch else 1} ;; esac
exec "{sys.executable}" "$@"
""")
    python.chmod(0o755)
    return folder


def test_an_active_environment_is_installed_into_once(place, tmp_path):
    env = active_environment(tmp_path / "env", torch=False)
    first = sourced(place, "setup_env test", VIRTUAL_ENV=env)
    assert first.returncode == 0, first.stderr
    told = (env / "pip.log").read_text().splitlines()
    assert told == [f"-m pip install -c {place}/constraints.txt torch",
                    f"-m pip install -c {place}/constraints.txt -e {place}[test]"]
    second = sourced(place, "setup_env test", VIRTUAL_ENV=env)
    assert "is up to date" in second.stdout and (env / "pip.log").read_text().splitlines() == told
    (place / "constraints.txt").write_text("torch==2.13.0\n")
    sourced(place, "setup_env test", VIRTUAL_ENV=env)
    assert len((env / "pip.log").read_text().splitlines()) == 4
    assert not (place / ".venv").exists()


def test_a_torch_in_an_active_environment_stays(place, tmp_path):
    env = active_environment(tmp_path / "env", torch=True)
    assert sourced(place, "setup_env test", VIRTUAL_ENV=env).returncode == 0
    assert "constraints" not in (env / "pip.log").read_text()


def test_a_failed_installation_ends_the_script_and_is_tried_again(place, tmp_path):
    env = active_environment(tmp_path / "env", works=False)
    for _ in range(2):
        done = sourced(place, "setup_env test; echo went on", VIRTUAL_ENV=env)
        assert done.returncode == 1 and "went on" not in done.stdout
        assert "error: torch could not be installed" in done.stderr


@pytest.mark.parametrize("python, words", [("/no/such/python", "does not run"), ("old", "is Python 3.8.1; 3.10 or newer")])
def test_an_unfit_interpreter_is_named(python, words, place, tmp_path):
    if python == "old":
        python = tmp_path / "old"
        python.write_text('#!/bin/bash\ncase "$*" in *exit*) exit 1 ;; *) echo 3.8.1 ;; esac\n')
        python.chmod(0o755)
    done = sourced(place, "setup_env test; echo went on", PYTHON=python)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert done.stderr.startswith("error:") and words in done.stderr and str(python) in done.stderr


@pytest.mark.parametrize("options, words", [
    (["--iters", "x"], "--iters x is not"), (["--tp", "3"], "--tp 3"), (["--pp", "5"], "--pp 5"),
    (["--out"], "--out needs a value"), (["--frobnicate"], "--frobnicate is no option"), (["--iters", "2"], "too few")])
def test_quickstart_refuses_bad_options_before_it_does_anything(options, words, tmp_path):
    done = run("bash", ROOT / "examples" / "quickstart.sh", *options, cwd=tmp_path, QUICKSTART_OUT=tmp_path / "out")
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_quickstart_help_needs_no_set_up(tmp_path):
    done = run("bash", ROOT / "examples" / "quickstart.sh", "--help", cwd=tmp_path, QUICKSTART_OUT=tmp_path / "out")
    assert done.returncode == 0 and "QUICKSTART_ITERS" in done.stdout and not (tmp_path / "out").exists()


def test_quickstart_goes_from_text_to_the_table(tmp_path):
    env = active_environment(tmp_path / "env")
    done = run("bash", ROOT / "examples" / "quickstart.sh", "--iters", "4", "--pp", "1", "--out", tmp_path / "out",
               "--", "--hidden-size", "64", cwd=tmp_path, VIRTUAL_ENV=env, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder, = (tmp_path / "out").iterdir()
    full, bitfit = ((folder / f"{name}.log").read_text() for name in ("full", "bitfit"))
    first = [training_lines(log)[0] for log in (full, bitfit)]
    assert first[0]["loss"] == first[1]["loss"] and first[0]["grad_norm"] > first[1]["grad_norm"] > 0
    assert facts(bitfit)["trainable parameters"] == 11 * 64 * 4 + 2 * 64
    lines = [log.splitlines()[0].split() for log in (full, bitfit)]
    assert len(lines[1]) == len(lines[0]) + 1 and "--bitfit" in lines[1] and "--bitfit" not in lines[0]
    assert "bitfit" in (folder / "comparison.txt").read_text()
    assert [line for line in done.stdout.splitlines() if re.match(r" iteration +4/", line)], "no progress was shown"


@pytest.mark.parametrize("devices, options, said", [
    (0, [], "CPU (accelerators visible: 0): TP=2 PP=2 DP=1"), (1, [], "1 accelerators: TP=1 PP=1 DP=1"),
    (2, [], "2 accelerators: TP=2 PP=1 DP=1"), (3, [], "2 accelerators: TP=2 PP=1 DP=1"),
    (2, ["--dp", "2"], "2 accelerators: TP=1 PP=1 DP=2"), (4, [], "4 accelerators: TP=2 PP=2 DP=1"),
    (2, ["--pp", "2"], "CPU (accelerators visible: 2): TP=2 PP=2 DP=1"),
    (2, ["--tp", "1", "--pp", "2"], "2 accelerators: TP=1 PP=2 DP=1")])
def test_quickstart_uses_the_accelerators_it_finds(devices, options, said, tmp_path):
    python = active_environment(tmp_path / "env") / "bin" / "python"
    # counts as told, skips the data and stops at the first launch
    python.write_text(python.read_text().replace("exec ", f"""case "$*" in
    *device_count*) echo {devices}; exit ;;
    *torch.distributed.run*) echo "DS_ACCELERATOR=${{DS_ACCELERATOR:-}}"; exit 3 ;;
    examples/*.py* | tools/*.py*) exit ;;
esac
exec """))
    done = run("bash", ROOT / "examples" / "quickstart.sh", *options, "--out", tmp_path / "out", cwd=tmp_path,
               VIRTUAL_ENV=tmp_path / "env", DS_ACCELERATOR="")
    assert done.returncode == 1 and f"pretraining on {said}, " in done.stdout, done.stdout + done.stderr
    folder, = (tmp_path / "out").iterdir()
    accelerator = "cpu" if said.startswith("CPU") else ""
    assert (folder / "pretrain.log").read_text().splitlines()[-1] == f"DS_ACCELERATOR={accelerator}"


def test_quickstart_ends_non_zero_and_names_the_log_of_a_failed_run(tmp_path):
    env = active_environment(tmp_path / "env")
    done = run("bash", ROOT / "examples" / "quickstart.sh", "--iters", "4", "--tp", "1", "--pp", "1", "--out",
               tmp_path / "out", "--", "--hidden-size", "63", cwd=tmp_path, VIRTUAL_ENV=env, PYTHONPATH=ROOT)
    folder, = (tmp_path / "out").iterdir()
    assert done.returncode == 1 and f"its whole output is in {folder}/pretrain.log" in done.stderr
    assert "step 5 of 7 failed" in done.stderr and "torch/distributed" not in done.stderr
    assert "pretrain_gpt.py: error: --hidden-size 63 does not divide" in done.stderr
    assert "[6/7]" not in done.stdout
