"""Settings: one table, two sources, clear errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from app import COMMANDS, main, run
from programs.settings import FLAGS, SettingsError, parse_settings
from programs.settings.__main__ import SETTINGS_PAGE, markdown
from programs.settings.command_line import build_parser, default_http_workers
from programs.settings.config import ServiceConfig
from programs.settings.config_command import in_effect
from programs.settings.flags import COMMON, REMOVED
from routes.config import HttpConfig
from rwkv_batch import __version__
from rwkv_batch.config import ALL_BATCH_ROWS, EngineConfig
from rwkv_batch.kernels.registry import choose_ops
from sampling.registry import SAMPLERS
from state_pool.config import PoolConfig

DERIVED = {
    "defaults",
    "proxy_key",
    "pool",
    "drain_timeout_s",
    "model_name",
    "models_dir",
    "speculate",
    "replica_devices",
    "replica",
    "replicas",
    "engine",
    "model_file",
    "service",
    "loads_at_low_priority",
    "auto_fallback_fields",
    "only_idle_cores",
    "shares_sessions",
    # Constants that tests and benches change.
    "translate_cache",
    "micro_batches",
    "batch_step_layers",
    "prefill_chunk",
    "overlap",
    "overlap_on_cpu",
    "checkpoint_store_min_mb",
    "prefix_seen_mb",
    "transfer_states",
}
"""Fields set by a flag of another section or by the supervisor, or that are sections."""


@pytest.mark.parametrize("section", [ServiceConfig, HttpConfig, EngineConfig, PoolConfig])
def test_every_field_has_a_flag(section: type[msgspec.Struct]) -> None:
    fields = {field.name for field in msgspec.structs.fields(section)}
    assert fields - {flag.field for flag in FLAGS[section]} <= DERIVED  # type: ignore[index]


@pytest.mark.parametrize("option", REMOVED)
def test_a_removed_flag_only_warns(option: str, caplog: pytest.LogCaptureFixture) -> None:
    variable = "RWKV_" + option.removeprefix("--").replace("-", "_").upper()
    assert parse_settings([option, "7"], {}) == parse_settings([], {variable: "7"}) == parse_settings([], {})
    assert [option in record.message for record in caplog.records] == [True, True]


def test_devices_of_several_engines() -> None:
    settings = parse_settings(["--pp-devices", "0,1;2,cpu"], {})
    assert settings.service.replicas == 2
    assert settings.service.replica_devices == (("cuda:0", "cuda:1"), ("cuda:2", "cpu"))
    assert settings.engine.devices == ("cuda:0", "cuda:1")
    assert parse_settings(["--replicas", "3"], {}).service.replica_devices == ()
    with pytest.raises(SettingsError, match="names 2 engines, --replicas 3"):
        parse_settings(["--pp-devices", "0;1", "--replicas", "3"], {})


def test_a_number_below_zero_that_has_a_meaning() -> None:
    flag = "--max-batch-rows-with-interactive"
    assert parse_settings([flag, "-1"], {}).engine.max_batch_rows_with_interactive == ALL_BATCH_ROWS
    with pytest.raises(SettingsError, match=r"-1\.\.1000000"):
        parse_settings([flag, "-2"], {})


def test_an_older_name_of_a_flag_is_the_same_flag() -> None:
    assert parse_settings(["--batch-rows-beside", "3"], {}) == parse_settings([], {"RWKV_BATCH_ROWS_BESIDE": "3"})
    newer = parse_settings(["--max-batch-rows-with-interactive", "3"], {"RWKV_BATCH_ROWS_BESIDE": "4"})
    assert newer.engine.max_batch_rows_with_interactive == 3


def test_the_former_name_of_a_weight_type_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_settings(["--dtype", "w8a8"], {}).engine.dtype == "int8"
    assert "write --dtype int8" in caplog.text


def test_the_page_of_settings_is_up_to_date() -> None:
    assert SETTINGS_PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m programs.settings"


def test_every_flag_and_variable_is_unique() -> None:
    flags = [flag for section in FLAGS.values() for flag in section]
    assert len({flag.option for flag in flags}) == len({flag.variable for flag in flags}) == len(flags)
    reported = build_parser().full_help()
    assert all(flag.option in reported for flag in flags)
    short = build_parser().format_help()
    assert {flag.field for flag in flags if f"  {flag.option} " in short} == set(COMMON)


def test_defaults_are_those_of_the_config_structs() -> None:
    settings = parse_settings([], {})
    assert settings.engine == EngineConfig(model_path="")
    assert settings.http == HttpConfig()
    assert settings.service.http_workers >= 2


def test_the_command_line_wins_over_the_environment() -> None:
    settings = parse_settings(["--port", "9"], {"RWKV_PORT": "8", "RWKV_L1_SESSIONS": "3", "RWKV_WARMUP": "no"})
    assert settings.http.port == 9
    assert settings.engine.pool.l1_sessions == 3
    assert settings.engine.warmup is False
    assert parse_settings([], {"RWKV_PORT": ""}).http.port == 8000


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("[0,1,2,3]", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("0, 1", ("cuda:0", "cuda:1")),
        ("cuda:0,cpu", ("cuda:0", "cpu")),
        ("auto", ("auto",)),
    ],
)
def test_devices(text: str, devices: tuple[str, ...]) -> None:
    assert parse_settings(["--pp-devices", text], {}).engine.devices == devices


def test_localhost_becomes_an_address() -> None:
    assert parse_settings(["--host", "localhost"], {}).http.host in ("127.0.0.1", "::1")


def test_password_from_flag_variable_and_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("from file\nsecond line\n")
    assert parse_settings(["--password", "a"], {"RWKV_PASSWORD": "b"}).http.password == "a"
    assert parse_settings([], {"RWKV_PASSWORD": "b"}).http.password == "b"
    assert parse_settings(["--password-file", str(secret)], {}).http.password == "from file"
    assert parse_settings([], {"RWKV_PASSWORD_FILE": str(secret)}).http.password == "from file"


def test_shared_values_reach_both_sides() -> None:
    settings = parse_settings(["--model-name", "m", "--drain-timeout-s", "7"], {})
    assert settings.http.model_name == settings.engine.model_name == "m"
    assert settings.http.drain_timeout_s == settings.engine.drain_timeout_s == 7


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--warmup", "perhaps"], {}, "--warmup"),
        (["--samplers", "rapid,dice"], {}, "dice"),
        (["--tune-device", "bogus"], {}, "--tune-device must be auto, none, cpu or a GPU like cuda:0, got .bogus."),
        (["--tune-device", "meta"], {}, "--tune-device"),
        (["--gpu-memory-utilization", "nan"], {}, "--gpu-memory-utilization"),
        ([], {"RWKV_MAX_RUNNING": "-1"}, "RWKV_MAX_RUNNING"),
        (["serve"], {}, "serve"),
        (["--port"], {}, "--port"),
        (["--pp-layers", "2.3,4"], {}, "--pp-layers must be whole numbers or halves"),
        (["--pp-layers", "5.5,0.5"], {}, r"--pp-layers must be 1\.\.1000, got 0\.5$"),
    ],
)
def test_errors_name_the_flag(arguments: list[str], environment: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as refusal:
        parse_settings(arguments, environment)
    assert "\n" not in str(refusal.value)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    name, *others = capsys.readouterr().out.splitlines()
    assert (ended.value.code, name) == (0, f"rwkv-batch {__version__}")
    parts = dict(line.split(maxsplit=1) for line in others)
    assert list(parts) == ["commit", "torch", "CUDA", "GPU"]
    assert parts["torch"] == torch.__version__ and parts["CUDA"] == (torch.version.cuda or "none")


def test_an_unknown_command_names_the_nearest_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sreve"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'sreve'; did you mean serve?\n"
    assert main(["qqq"]) == 2
    assert f"the commands are {', '.join(COMMANDS)}\n" in capsys.readouterr().err


def test_the_bench_command_lists_programs_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing"]) == 2
    names = capsys.readouterr().err.removeprefix("error: bench needs the name of a program: ").strip()
    assert {"cpu", "gpu", "serve", "chaos", "quality"} <= set(names.split(", "))
    assert not {"tools.http_load", "quality_states"} & set(names.split(", "))


@pytest.mark.parametrize(
    ("expected", "reason"), [("cuda", "do not run on cpu"), ("x", "one of auto, cuda, cpu, naive")]
)
def test_unavailable_kernels_name_alternatives(expected: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{expected}.*{reason}.*--kernels auto"):
        choose_ops(expected, torch.device("cpu"))


def test_http_workers_by_cpus() -> None:
    assert [default_http_workers(cpus) for cpus in (1, 2, 7, 8, 15, 16, 256)] == [2, 2, 2, 4, 4, 8, 8]


def test_every_sampler_can_be_requested() -> None:
    assert parse_settings([], {}).engine.samplers == tuple(SAMPLERS)
    for names in (tuple(reversed(SAMPLERS)), *((name,) for name in SAMPLERS)):
        assert parse_settings(["--samplers", ",".join(names)], {}).engine.samplers == names


def test_an_unknown_variable_is_named_with_the_nearest_setting(caplog: pytest.LogCaptureFixture) -> None:
    parse_settings([], {"RWKV_STATE_BD": "x.db", "RWKV_QQQQ": "1", "RWKV_PORT": "8001", "RWKV_BUILD_DIR": "/tmp"})
    assert [record.getMessage() for record in caplog.records] == [
        "the variable RWKV_QQQQ has no effect, since no setting has this name; docs/settings.md has all of them",
        "the variable RWKV_STATE_BD has no effect, since no setting has this name; did you mean RWKV_STATE_DB?",
    ]


def test_a_missing_package_is_named_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\", name='msgspec')")
    done = subprocess.run(
        [sys.executable, "app.py", "--version"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: No module named 'msgspec'; install the packages of this version: pip install -r requirements.txt\n"
    )


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rwkv.toml"
    file.write_text(
        'port = 1001\nmax_running = 7\nmodel-name = "of-file"\nstrict-fields = true\nsamplers = ["cpu", "rapid"]\n'
    )
    environment = {"RWKV_CONFIG": str(file), "RWKV_PORT": "1002", "RWKV_MAX_RUNNING": "8"}
    settings = parse_settings(["--port", "1003"], environment)
    assert (settings.http.port, settings.engine.max_running, settings.http.model_name) == (1003, 8, "of-file")
    assert settings.http.strict_fields and settings.engine.samplers == ("cpu", "rapid")
    lines = dict(line.split(maxsplit=1) for line in in_effect(["--port", "1003"], environment).splitlines())
    assert lines["port"].split() == ["1003", "flag"] and lines["max-running"].split() == ["8", "environment"]
    assert lines["model-name"].split() == ["of-file", str(file)] and lines["host"].split() == ["127.0.0.1", "default"]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("prot = 1", "a setting 'prot', which does not exist; did you mean port"),
        ("port =", "cannot be read as TOML"),
        ("[port]\na = 1", "port must be a text, a number, true, false, or a list"),
        ("port = 700000", r"rwkv\.toml: port must be .*, got 700000"),
        ("max_running = 1\nmax-running = 2", "has the setting max-running twice"),
        ("#" * (1 << 20) + "\nport = 1", "has more than 1 MiB"),
    ],
)
def test_errors_in_a_file_name_the_setting(tmp_path: Path, text: str, refusal: str) -> None:
    file = tmp_path / "rwkv.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=refusal):
        parse_settings(["--config", str(file)], {})


def test_the_template_has_every_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    values = [line for line in text.splitlines() if re.match(r"# [a-z0-9-]+ = ", line)]
    assert len(values) == sum(map(len, FLAGS.values()))
    file = tmp_path / "rwkv.toml"
    file.write_text("\n".join(line.removeprefix("# ") for line in values))
    assert parse_settings(["--config", str(file)], {}) == parse_settings([], {})


def test_secrets_are_not_shown() -> None:
    assert "secret" not in in_effect(["--password", "secret", "--state-db", "postgresql://a:secret@h/n"], {})


def test_switches_need_no_value_and_unknown_flags_name_the_nearest() -> None:
    assert parse_settings(["--strict-fields", "--port", "1"], {}).http.strict_fields
    with pytest.raises(SettingsError, match="did you mean --strict-fields"):
        parse_settings(["--strict-field"], {})


def test_without_arguments_the_command_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rwkv-batch"])
    with pytest.raises(SystemExit) as ended:
        run()
    text = capsys.readouterr().out
    assert ended.value.code == 0 and all(name in text for name in COMMANDS)
