"""Write (or with --check compare) argocd/argocd-cm.yaml: the Lua files as Argo CD's ConfigMap wants them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent / "argocd"
GROUP = "earlyexit.dev"
HEAD = "# Made of health/ and actions/ by gitops/build.py: make gen. Merge it into Argo CD's ConfigMap.\n"


class Block(str):
    """A text that is written as a block."""

    __slots__ = ()


def _block(dumper: yaml.Dumper, text: Block) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")


yaml.add_representer(Block, _block)


def customizations() -> dict[str, str]:
    """The data of the ConfigMap."""
    data: dict[str, str] = {}
    for path in sorted((HERE / "health").glob("*.lua")):
        data[f"resource.customizations.health.{GROUP}_{path.stem}"] = Block(path.read_text())
    for folder in sorted((HERE / "actions").iterdir()):
        scripts = {path.stem: Block(path.read_text()) for path in sorted(folder.glob("*.lua"))}
        discovery = scripts.pop("discovery")
        actions = {
            "discovery.lua": discovery,
            "definitions": [{"name": n, "action.lua": s} for n, s in scripts.items()],
        }
        data[f"resource.customizations.actions.{GROUP}_{folder.name}"] = Block(
            yaml.dump(actions, sort_keys=False, width=1000)
        )
    return data


def text() -> str:
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "argocd-cm", "namespace": "argocd", "labels": {"app.kubernetes.io/part-of": "argocd"}},
        "data": customizations(),
    }
    return HEAD + yaml.dump(manifest, sort_keys=False, width=1000)


def main() -> None:
    """Write the ConfigMap, or fail where it has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    path, made = HERE / "argocd-cm.yaml", text()
    if not parser.parse_args().check:
        path.write_text(made, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != made:
        sys.exit("gitops/argocd/argocd-cm.yaml has drifted from its Lua files; run 'make gen'")


if __name__ == "__main__":
    main()
