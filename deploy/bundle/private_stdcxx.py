#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gives a bundle's libstdc++ names of its own, in place: private_stdcxx.py FILE...

The FILEs are that libstdc++ and all programs and libraries of the bundle. Those libraries are loaded into other people's
processes. A process has one libstdc++.so.6: whichever it loaded first. An older one lacks what the bundle needs, and the bundle's
may lack what the process needs later. So both have to work side by side, which takes three changes:

- The file gets another name, so each side loads its own.
- The versions of its symbols get other names, so neither side takes the other's symbols.
- Unique symbols become ordinary ones. A process has one of each unique symbol, whatever its version. Among them are the
  numbers of some locale facets. Two libstdc++ that share those put facets in each other's places, and the process's own
  std::ostream no longer writes numbers.

New names are as long as the old ones, so nothing moves.
"""
import pathlib
import struct
import sys

OLD_FILE, NEW_FILE = b"libstdc++.so.6", b"libstdc++vr.so"
VERSIONS = ((b"GLIBCXX_", b"VRAMCXX_"), (b"CXXABI_", b"VRMABI_"))

# From <elf.h>.
SHT_DYNAMIC, SHT_DYNSYM, SHT_GNU_VERDEF, SHT_GNU_VERNEED = 6, 11, 0x6FFFFFFD, 0x6FFFFFFE
DT_NEEDED, DT_SONAME = 1, 14
STB_GLOBAL, STB_GNU_UNIQUE = 1, 10


def elf_hash(name):
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


class Elf:
    def __init__(self, data):
        self.data = data
        (start,), (size, count) = self.read("<Q", 0x28), self.read("<HH", 0x3A)
        headers = [self.read("<IIQQQQI", start + i * size) for i in range(count)]
        self.sections = [(kind, offset, length, link) for _, kind, _, _, offset, length, link in headers]

    def read(self, layout, at):
        return struct.unpack_from(layout, self.data, at)

    def rename(self, at):
        """Changes the name at `at` if it is one of libstdc++'s. Returns what it is now."""
        name = bytes(self.data[at:self.data.index(0, at)])
        if name == OLD_FILE:
            name = NEW_FILE
        for old, new in VERSIONS:
            if name.startswith(old):
                name = new + name[len(old):]
        self.data[at:at + len(name)] = name
        return name

    def change(self):
        is_stdcxx = False
        for kind, start, size, link in self.sections:
            strings = self.sections[link][1]
            if kind == SHT_DYNAMIC:
                for at in range(start, start + size, 16):
                    tag, value = self.read("<QQ", at)
                    if tag in (DT_NEEDED, DT_SONAME):
                        is_stdcxx |= self.rename(strings + value) == NEW_FILE and tag == DT_SONAME
            elif kind == SHT_GNU_VERNEED:
                self.change_needed(start, strings)
            elif kind == SHT_GNU_VERDEF:
                self.change_defined(start, strings)
        if is_stdcxx:
            self.change_symbols()

    def change_needed(self, at, strings):
        while True:
            _, count, file, first, following = self.read("<HHIII", at)
            is_stdcxx = self.rename(strings + file) == NEW_FILE
            version = at + first
            for _ in range(count if is_stdcxx else 0):
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

    def change_symbols(self):
        for kind, start, size, _ in self.sections:
            for at in range(start, start + size, 24) if kind == SHT_DYNSYM else ():
                if self.data[at + 4] >> 4 == STB_GNU_UNIQUE:
                    self.data[at + 4] = STB_GLOBAL << 4 | self.data[at + 4] & 15


def main():
    for path in map(pathlib.Path, sys.argv[1:]):
        data = bytearray(path.read_bytes())
        if data[:6] != b"\x7fELF\x02\x01":
            sys.exit(f"private_stdcxx.py: {path} is no 64-bit little-endian ELF file")
        Elf(data).change()
        path.write_bytes(data)


if __name__ == "__main__":
    main()
