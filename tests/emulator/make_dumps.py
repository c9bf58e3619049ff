"""Write the golden dumps of one Triton release: what its compiler prints for some cases.

Run it with each release first on PYTHONPATH: `python -m tests.emulator.make_dumps`.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.emulator import corpus, support
from tileloom import emulator
from tileloom.emulator import capture, dialect

DUMPS = Path(__file__).parent / "dumps"
DUMPED = {
    "pipelined_gemm": "ttgir",
    "named_barriers": "ttgir",
    "copied_gemm": "machine",
    "split_sum": "machine",
    "cluster_gemm": "ttgir",
}


def main():
    version = ".".join(map(str, dialect.VERSION))
    folder = DUMPS / version
    folder.mkdir(parents=True, exist_ok=True)
    plain = capture._program

    def keep(text):
        header, _, body = text.partition("\n")
        program = plain(text)
        level = header.split()[-1]
        body = re.sub(r'"/[^"]*/([^/"]+\.py)"', r'"\1"', body)
        (folder / f"{program.name}.{level}.mlir").write_text(body)
        return program

    capture._program = keep
    try:
        for name, level in DUMPED.items():
            if name not in corpus.CASES:  # clusters, on Triton 3.6
                continue
            with emulator.run(level=level):
                support.load_case(name).main()
    finally:
        capture._program = plain


if __name__ == "__main__":
    main()
