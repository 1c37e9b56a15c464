"""Formulas that algebra takes long for: towers, factorials, depth, many terms, huge bounds."""

from __future__ import annotations


def costly_answers() -> list[str]:
    """At least 150 of them, none of which is equal to a reference of the tests."""
    sizes = (20, 60, 200, 400)
    made = [f"{base}^{{{base}^{{{base}^{{{top}}}}}}}" for base in (2, 3, 7, 9, 99) for top in (9, 99, 999)]
    made += [f"{base}^{{{base}^{{{top}}}}}" for base in (9, 12, 10) for top in (9, 20, 10**6)]
    made += ["2^{" * count + "2" + "}" * count for count in (3, 5, 10, 40)]
    made += [f"{number}!" for number in (200, 1000, 10**5, 10**9)] + [
        f"({number})!" for number in ("10^9", "9^9", "2000")
    ]
    made += ["((20!)!)!", "(5!)!!", "9!^{9!^{9!}}", "(100!)^{100!}", "((3!)!)!", r"\frac{1000!}{998!}", r"\sqrt{5000!}"]
    made += [
        rf"\binom{{{top}}}{{{bottom}}}" for top, bottom in ((10**6, 5 * 10**5), (10**9, 3), (99999, 4321), (5000, 2500))
    ]
    made += [
        rf"\{name}_{{k=1}}^{{{end}}} {term}"
        for name in ("sum", "prod")
        for end in ("10^9", "10^{12}", r"\infty", "99999")
        for term in (r"\frac{1}{k^2+k}", "k^k")
    ]
    made += [
        r"\int_0^1 \sin(\cos(\tan(x^x))) dx",
        r"\int_0^{\infty} \frac{e^{-x^2}\sin x}{x^5+1} dx",
        r"\iint x^y y^x dx dy",
    ]
    made += [
        r"\lim_{x \to 0} \frac{\sin(\tan(x)) - \tan(\sin(x))}{x^{17}}",
        r"\lim_{n \to \infty} (1+\frac{1}{n})^{n^n}",
    ]
    made += ["+".join(f"\\sqrt{{{n}}}" for n in range(2, 2 + count)) for count in sizes[:3]]
    made += ["+".join(f"x^{{{n}}}" for n in range(count)) for count in sizes[:3]]
    made += ["+".join(f"\\frac{{{n}}}{{{n + 1}}}" for n in range(1, 1 + count)) for count in (40, 100)]
    made += ["+".join(["x"] * count) for count in (100, 400, 900)]
    made += ["\\cdot ".join(f"(x+{n})" for n in range(count)) for count in (30, 60, 100)]
    made += [f"({'+'.join('abcdexyz'[:terms])})^{{{power}}}" for terms in (2, 3, 5, 8) for power in (30, 100, 500)]
    made += [" | ".join(map(str, range(100, 100 + count))) for count in (12, 20, 60)]
    made += [r"\sqrt{2+" * count + "1" + "}" * count for count in (8, 15, 40, 90)]
    made += [r"\frac{1}{1+" * count + "x" + "}" * count for count in (8, 15, 40, 90)]
    made += [rf"\sqrt[{index}]{{{10**size + 7}}}" for index in (3, 17, 97) for size in (20, 60)]
    made += ["(" * count + "1" + ")" * count for count in (20, 90, 300)] + [
        "{" * count + "1" + "}" * count for count in (30, 90)
    ]
    made += [
        "\\begin{pmatrix}"
        + r"\\".join("&".join(f"\\sqrt{{{row + 2}}}" for _ in range(size)) for row in range(size))
        + "\\end{pmatrix}"
        for size in (5, 9, 14)
    ]
    made += ["9" * size + "^" + "{" + "9" * size + "}" for size in (3, 10, 50, 300)]
    made += [f"1e{size}" for size in ("9999", "999999", "999999999")] + [
        f"10^{{{power}}}" for power in (5000, 10**7, "10^{10}")
    ]
    made += [r"\sin(" * count + "1" + ")" * count for count in (5, 10, 20, 60)]
    made += [r"\log_{2}(" * count + "5" + ")" * count for count in (5, 15, 40)]
    made += [r"\log_1 1", r"\log_0 5", r"\frac{1}{0}", r"0^0", r"\frac{0}{0}", r"\tan 90^\circ", r"\log 0"]
    made += [r"\{" + ",".join(f"\\sqrt{{{n}}}" for n in range(2, 2 + count)) + r"\}" for count in (40, 120)]
    made += [",".join(map(str, range(count))) for count in (100, 400)]
    made += [
        "=".join(["5"] * 300),
        "=".join([r"\sqrt{5}"] * 60),
        "-" * 500 + "5",
        "5 " + "m/" * 300 + "s",
        "|" * 60 + "x" + "|" * 60,
    ]
    made += [f"x^{{{n}}} = {n}^x" for n in (50, 999, 12345)] + [rf"e^{{e^{{e^{{{n}}}}}}}" for n in (3, 10, 100)]
    made += [rf"(1+\sqrt{{2}})^{{{n}}}" for n in (50, 500, 5000)] + [
        rf"(\sqrt{{2}}+\sqrt{{3}}+\sqrt{{5}}+\sqrt{{7}})^{{{n}}}" for n in (4, 8, 20)
    ]
    made += [rf"\frac{{x^{{{n}}}-1}}{{x-1}}" for n in (50, 300, 1500)] + [rf"\cos({n}x)" for n in (7, 99, 12345)]
    made += [f"{base} \\bmod {10**9}" for base in ("7^{10^{9}}", "2^{1000000}")] + [
        "i^{i^{i^i}}",
        "x^{x^{x^x}}",
        r"\Gamma(10^6)",
    ]
    made += [
        rf"\gcd({10**40 + 1},{10**41 + 3})",
        r"\zeta(1)",
        r"\sqrt{-" * 10 + "1" + "}" * 10,
        "x" * 200,
        "abcdefgh" * 20,
    ]
    return made
