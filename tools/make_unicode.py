#!/usr/bin/env python3
"""Prints the character class table of ds4.cpp (section 11, kClassRuns) from a file of Unicode ranges.

usage: make_unicode.py RANGES > table.inc

RANGES has lines "CLASS FIRST LAST" (hex, inclusive), CLASS one of L M N P S W; other classes and # comments are ignored.
The table is the run-length code of all code points from U+0000: a class letter (O for what no class claims), then the
length of the run in base 32, digits 0-9a-v, left out when it is 1. The last run of O is left out.
"""
import itertools
import sys

DIGITS = '0123456789abcdefghijklmnopqrstuv'
WIDTH = 114


def base32(n):
    return (base32(n // 32) if n >= 32 else '') + DIGITS[n % 32]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    classes = ['O'] * 0x110000
    for line in open(sys.argv[1], encoding='ascii'):
        fields = line.split()
        if len(fields) == 3 and fields[0] in ('L', 'M', 'N', 'P', 'S', 'W'):
            first, last = int(fields[1], 16), int(fields[2], 16)
            if set(classes[first:last + 1]) != {'O'}:
                sys.exit('overlapping ranges: ' + line.strip())
            classes[first:last + 1] = fields[0] * (last - first + 1)
    runs = [k + (base32(n) if n > 1 else '') for k, n in ((k, len(list(g))) for k, g in itertools.groupby(classes))]
    if runs[-1][0] == 'O':
        runs.pop()
    lines = ['']
    for run in runs:
        if len(lines[-1]) + len(run) > WIDTH:
            lines.append('')
        lines[-1] += run
    print('\n'.join('    "%s"' % line for line in lines) + ';')


if __name__ == '__main__':
    main()
