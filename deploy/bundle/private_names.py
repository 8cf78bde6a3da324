#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gives a bundle's libraries names of their own, in place: private_names.py FILE...

The FILEs are all programs and libraries of the bundle. The libraries are loaded into other people's processes, and a process has
one library of each name, whichever it loaded first. An older libstdc++.so.6 lacks what the bundle needs, and the bundle's may lack
what the process needs later; a libgrpc.so.29 or libprotobuf.so.32 that was built against another Abseil does not fit at all. So
the process's libraries and the bundle's have to work side by side, which takes three changes:

- The files get other names, so each side loads its own: libprotobuf.so.32 becomes vrbprotobuf.so.32.
- The versions of libstdc++'s symbols get other names, so neither side takes the other's symbols.
- Unique symbols become ordinary ones. A process has one of each unique symbol, whatever its version. Among libstdc++'s are the
  numbers of some locale facets. Two libstdc++ that share those put facets in each other's places, and the process's own
  std::ostream no longer writes numbers.

Two keep their names: vrambroker's own, which programs link, and libgcc_s, since exceptions need one unwinder for all of a process.
Any version of that one will do: nothing in a bundle, and hardly anything elsewhere, needs more than GCC 4.2 had.

Symbols without a version are kept apart as in any build: the core is loaded with RTLD_LOCAL, and with RTLD_DEEPBIND where the
program itself has a gRPC (client/c/load_core.cc).

New names are as long as the old ones, so nothing moves.
"""
import pathlib
import re
import struct
import sys

VERSIONS = (("GLIBCXX_", "VRAMCXX_"), ("CXXABI_", "VRMABI_"))

# From <elf.h>.
SHT_DYNAMIC, SHT_DYNSYM, SHT_GNU_VERDEF, SHT_GNU_VERNEED = 6, 11, 0x6FFFFFFD, 0x6FFFFFFE
DT_NEEDED, DT_SONAME = 1, 14
STB_GLOBAL, STB_GNU_UNIQUE = 1, 10


def elf_hash(name):
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def new_name(file):
    """Of a library of the bundle."""
    return file if re.match(r"lib(vrambroker|gcc_s)\b", file) else re.sub("^lib", "vrb", file)


class Elf:
    def __init__(self, data, files):
        """`files`: the names of the libraries that are to be renamed."""
        self.data, self.files = data, files
        (start,), (size, count) = self.read("<Q", 0x28), self.read("<HH", 0x3A)
        headers = [self.read("<IIQQQQI", start + i * size) for i in range(count)]
        self.sections = [(kind, offset, length, link) for _, kind, _, _, offset, length, link in headers]
        if size != 64 or SHT_DYNAMIC not in (kind for kind, *_ in self.sections):
            raise ValueError("has no table of sections with a dynamic one")

    def read(self, layout, at):
        return struct.unpack_from(layout, self.data, at)

    def rename(self, at):
        """Changes the name at `at` if it is one that gets a new one. Returns what it is now."""
        name = bytes(self.data[at:self.data.index(0, at)]).decode()
        if name in self.files:
            name = new_name(name)
        for old, new in VERSIONS:
            if name.startswith(old):
                name = new + name[len(old):]
        self.data[at:at + len(name)] = name.encode()
        return name

    def change(self):
        for kind, start, size, link in self.sections:
            strings = self.sections[link][1]
            if kind == SHT_DYNAMIC:
                for at in range(start, start + size, 16):
                    tag, value = self.read("<QQ", at)
                    if tag in (DT_NEEDED, DT_SONAME):
                        self.rename(strings + value)
            elif kind == SHT_GNU_VERNEED:
                self.change_needed(start, strings)
            elif kind == SHT_GNU_VERDEF:
                self.change_defined(start, strings)
            elif kind == SHT_DYNSYM:
                self.change_symbols(start, size)

    def change_needed(self, at, strings):
        while True:
            _, count, file, first, following = self.read("<HHIII", at)
            self.rename(strings + file)
            version = at + first
            for _ in range(count):
                _, _, _, name, step = self.read("<IHHII", version)
                struct.pack_into("<I", self.data, version, elf_hash(self.rename(strings + name)))
                version += step
            if following == 0:
                return
            at += following

    def change_defined(self, at, strings):
        while True:
            _, _, _, count, _, first, following = self.read("<HHHHIII", at)
            names, name_at = [], at + first
            for _ in range(count):  # its own, and those that it follows
                name, step = self.read("<II", name_at)
                names.append(self.rename(strings + name))
                name_at += step
            struct.pack_into("<I", self.data, at + 8, elf_hash(names[0]))
            if following == 0:
                return
            at += following

    def change_symbols(self, start, size):
        for at in range(start, start + size, 24):
            if self.data[at + 4] >> 4 == STB_GNU_UNIQUE:
                self.data[at + 4] = STB_GLOBAL << 4 | self.data[at + 4] & 15


def main():
    paths = [pathlib.Path(path) for path in sys.argv[1:]]
    files = {path.name for path in paths if new_name(path.name) != path.name}
    for path in paths:
        data = bytearray(path.read_bytes())
        if data[:6] != b"\x7fELF\x02\x01":
            sys.exit(f"private_names.py: {path} is no 64-bit little-endian ELF file")
        try:
            Elf(data, files).change()
        except (ValueError, struct.error) as error:
            sys.exit(f"private_names.py: {path}: {error}")
        path.write_bytes(data)
        path.rename(path.with_name(new_name(path.name)))


if __name__ == "__main__":
    main()
