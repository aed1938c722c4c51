#!/usr/bin/env python3
"""Write a CycloneDX bill of materials of what the images are made of.

Usage: images/sbom.py [--output FOLDER]   (default: build/sbom)

One file per image: the Debian packages of the base that ``images/build`` puts below it, Python itself among them, and
the Python distributions of its slice of ``requirements.lock`` (and for NVIDIA's GPUs of ``images/cuda.txt``), each with
the hashes of the files it comes from. The same commit on the same base always gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

from build import CUDA_LOCK, PARTS, base, lock_blocks, requirements

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = uuid.UUID("6f0c3f6e-6d1c-5c53-9d8b-0e8f0f1f7f5a")  # of our serial numbers, which are hashes of the content


def component(block: str) -> dict[str, Any]:
    """A distribution of a lock file: its pin and its hashes.

    Raises
    ------
    ValueError
        The block is no exact pin, or has no hash.
    """
    pin = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", block)
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
    if pin is None or not hashes:
        raise ValueError(f"requirements.lock: {block.splitlines()[0]!r} is not pinned with ==VERSION and a sha256 hash")
    name, version = re.sub(r"[-_.]+", "-", pin[1]).lower(), pin[2]
    purl = f"pkg:pypi/{name}@{version}"
    # A pin has a hash per wheel and one of them is installed, so they belong to files that may be fetched.
    files = [
        {"type": "distribution", "url": purl, "hashes": [{"alg": "SHA-256", "content": h}]} for h in sorted(hashes)
    ]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "externalReferences": files,
    }


def debian_packages(base: Path) -> list[dict[str, Any]]:
    """What the lowest layer is made of, as it says itself."""
    release = dict(line.partition("=")[::2] for line in (base / "etc" / "os-release").read_text().splitlines())
    distro = f"{release['ID']}-{release['VERSION_ID']}".replace('"', "")
    return [_debian_package(file.read_text(), distro) for file in (base / "var/lib/dpkg/status.d").iterdir()]


def _debian_package(control: str, distro: str) -> dict[str, Any]:
    fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", control, re.MULTILINE))
    name, version = fields["Package"], fields["Version"]
    qualifiers = f"arch={fields['Architecture']}&distro={distro}"
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?{qualifiers}"
    hashes = [{"alg": "SHA-256", "content": fields["SHA256"]}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "hashes": hashes}


def bill(image: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The document for one image. Its serial number is a hash of what it lists."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    components = sorted(found, key=lambda item: str(item["purl"]))
    subject = {"type": "container", "bom-ref": f"offramp-{image}", "name": f"offramp/{image}", "version": version}
    content = json.dumps([subject, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, content)}",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": [item["bom-ref"] for item in components]}],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "sbom", help="folder (default: build/sbom)")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    lowest = debian_packages(base())
    pins = {name: requirements(part) for name, part in PARTS.items()}
    pins["worker-cuda"] = pins["worker"] + CUDA_LOCK.read_text()
    for name, own in pins.items():
        document = bill(name, [*lowest, *map(component, lock_blocks(own))])
        file = folder / f"{name}.cdx.json"
        file.write_text(json.dumps(document, indent=2) + "\n")
        print(f"{file}: {len(document['components'])} components")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
