# SPDX-License-Identifier: Apache-2.0
"""Makes the package for pip, by PEP 517 and PEP 660, with Python's own library alone.

The package is a folder of Python files. setuptools would do it as well, but a new environment of Debian 12 has no `wheel`,
and many machines with GPUs cannot download one. The name and version are in METADATA.
"""
import base64
import hashlib
import os
import tarfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "vrambroker"
WHEEL = "Wheel-Version: 1.0\nGenerator: vrambroker\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _metadata():
    """The text of METADATA, and the version in it."""
    with open(os.path.join(HERE, "METADATA"), encoding="utf-8") as file:
        text = file.read()
    return text, next(line.split()[1] for line in text.splitlines() if line.startswith("Version: "))


def _package_files():
    """Pairs: where each file of the package goes, and what is in it."""
    for name in sorted(os.listdir(os.path.join(HERE, PACKAGE))):
        if name.endswith(".py") or name == "py.typed":
            with open(os.path.join(HERE, PACKAGE, name), "rb") as file:
                yield PACKAGE + "/" + name, file.read()


def _write_wheel(folder, files):
    metadata, version = _metadata()
    info = "%s-%s.dist-info/" % (PACKAGE, version)
    files = list(files) + [(info + "METADATA", metadata.encode()), (info + "WHEEL", WHEEL.encode())]
    record = ""
    name = "%s-%s-py3-none-any.whl" % (PACKAGE, version)
    with zipfile.ZipFile(os.path.join(folder, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in files:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += "%s,sha256=%s,%d\n" % (path, digest, len(content))
            wheel.writestr(path, content)
        wheel.writestr(info + "RECORD", record + info + "RECORD,,\n")
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _write_wheel(wheel_directory, _package_files())


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _write_wheel(wheel_directory, [(PACKAGE + ".pth", (HERE + "\n").encode())])


def build_sdist(sdist_directory, config_settings=None):
    version = _metadata()[1]
    root = "%s-%s" % (PACKAGE, version)
    with tarfile.open(os.path.join(sdist_directory, root + ".tar.gz"), "w:gz") as archive:
        archive.add(os.path.join(HERE, "METADATA"), root + "/PKG-INFO")
        for name in ("METADATA", "README.md", "build_backend.py", "pyproject.toml"):
            archive.add(os.path.join(HERE, name), root + "/" + name)
        for path, _ in _package_files():
            archive.add(os.path.join(HERE, path), root + "/" + path)
    return root + ".tar.gz"
