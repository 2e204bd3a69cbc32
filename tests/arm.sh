#!/usr/bin/env bash
# arm.sh [FOLDER] [PYTEST ARGUMENTS]: the conformance of cpu-simd in an emulated 64-bit Arm Linux, on any Debian x86-64.
# Emulator, C library and Python are Debian's packages, the rest the wheels for aarch64; all in FOLDER, nothing is installed.
# The emulator has the NEON instructions of a Cortex-A72; it compiles and runs some fifty times slower than a CPU does.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath -m "${1:-$root/outputs/arm}")
[ $# = 0 ] || shift
system=$folder/system
mkdir -p "$folder"/{lists/partial,archives/partial,packages,wheels,cache} "$system"
cd "$folder/packages"
if [ ! -e "$folder/ready" ]; then
  apt=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::Lists="$folder/lists"
    -o Dir::Cache="$folder" -o Dir::State::status=/dev/null -o Acquire::Languages=none)
  apt-get download qemu-user-static
  apt-get "${apt[@]}" -qq update
  apt-get "${apt[@]}" download libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libbz2-1.0 liblzma5 libffi8 libssl3 \
    libcrypt1 libuuid1 libsqlite3-0 libtinfo6 libncursesw6 libreadline8 libdb5.3 \
    python3.11-minimal libpython3.11-minimal libpython3.11-stdlib
  for package in *.deb; do dpkg -x "$package" "$system"; done
  python3 -m pip download --quiet --only-binary=:all: --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_28_aarch64 --python-version 3.11 --dest "$folder/wheels" \
    numpy numba llvmlite threadpoolctl rich pytest hypothesis
  for wheel in "$folder"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$system/packages"; done
  touch "$folder/ready"
fi
cd "$root"
export QEMU_LD_PREFIX=$system QEMU_CPU=cortex-a72 PYTHONPATH=$system/packages:$root:$root/tests PYTHONHOME=$system/usr
export XDG_CACHE_HOME=$folder/cache PYTHONDONTWRITEBYTECODE=1
arm=("$system/usr/bin/qemu-aarch64-static" "$system/usr/bin/python3.11")
"${arm[@]}" -c 'import platform; from cnnexp.backends.simd.compiler.host import host_target; print(platform.machine(), host_target())'
# nothing is started in a process of its own: that would not be emulated
exec "${arm[@]}" -m pytest -q -p no:cacheprovider -p no:xdist "${@:-tests/backends/test_conformance.py}" -k cpu-simd
