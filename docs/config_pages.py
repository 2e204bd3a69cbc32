"""The reference of the config: every file of `conf/` as it stands, since a comment above each key explains it."""

from pathlib import Path

GROUPS = ("model", "backend", "optimizer", "dataset", "trainer", "workers", "tracking", "search", "debug")


def write(conf: Path, target: Path) -> None:
    """Write one page with every file of the config groups."""
    parts = [
        "# Config",
        "",
        "`python -m cnnexp GROUP=NAME GROUP.KEY=VALUE`; `--cfg job` prints the whole config of a run.",
        "",
    ]
    parts += ["## config.yaml", "", *_block(conf / "config.yaml")]
    for group in GROUPS:
        parts += [f"## {group}", ""]
        for file in sorted((conf / group).glob("*.yaml")):
            parts += [f"### {group}={file.stem}", "", *_block(file)]
    target.write_text("\n".join(parts), encoding="utf-8")


def _block(file: Path) -> list[str]:
    return ["```yaml", file.read_text(encoding="utf-8").rstrip(), "```", ""]
