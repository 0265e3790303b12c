r"""Boxed answers and DAPO: tables of equal and unequal answers, hostile text, a fuzz of all
scorers.

pytest tests/rewards/test_math_rewards.py
pytest tests/rewards/test_math_rewards.py -m slow    # with 100,000
"""

import json
import random
import time

import pyarrow.parquet as pq
import pytest
from helpers import ROOT
from hostile import HOSTILE, MEGA

from common.prepare import math as prepare
from common.rewards import (
    boxed_reward,
    countdown,
    dapo_reward,
    geometry,
    reward_function,
    score_response,
    visual_qa,
)
from common.rewards.answers import formulas, is_equal, normalize
from common.rewards.answers.formulas import Unreadable, read_formula
from common.rewards.math import last_boxed, score_boxed, score_dapo, score_gsm8k, verl_gsm8k

DATA = ROOT.parent / "shared" / "data" / "math"
PAIRS = DATA.parent / "math_pairs.jsonl"


def boxed_score(answer: str, truth: str) -> float:
    return score_boxed(rf"so it is $\boxed{{{answer}}}$.", truth)["score"]


# --- extraction ---


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5} and \framebox{6}", "6"),
        (r"\boxed{5} or \boxed{6}", "6"),
        (r"\boxed{5} cut off: \boxed{6", "5"),
        (r"\boxed{5} cut off: \boxed{\frac{1}{2}", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),
        (
            r"\boxed{\begin{pmatrix} 1 \\{2} \end{pmatrix}}",
            r"\begin{pmatrix} 1 \\{2} \end{pmatrix}",
        ),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"$\boxed{5}$, in a \boxed notation", "5"),
        (r"\\boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"{ \boxed{5} } }", "5"),
        (r"{{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"boxed{5}", None),
        (r"\boxed 5", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


# --- equal and unequal answers ---

SAME_SPELLING = [  # answer, ground truth: equal after normalisation, without a formula
    ("5", "5"),
    (" 5. ", "5"),
    ("5.0", "5"),
    ("+5", "5"),
    ("-0", "0"),
    ("033", "33"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    (r"\$1,234.50", "1234.5"),
    ("1{,}000", "1000"),
    (r"1,\!000", "1000"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"11,\! 111,\! 111,\! 100", "11,111,111,100"),
    (r"1{,}000\pi", r"1000\pi"),
    (r"\frac{20{,}000}{\pi}", r"\frac{20000}{\pi}"),
    ("−5", "-5"),
    ("0.5", r"\frac{1}{2}"),
    (".5", "1/2"),
    ("1/2", r"\frac12"),
    ("2/4", r"\dfrac{1}{2}"),
    (r"\tfrac{1}{2} + \frac1{72}", r"\dfrac{1}{2} +\! \frac{1}{72}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{6}{2}", "3"),
    (r"\frac34i", r"\frac{3}{4}i"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\sqrt 3", r"\sqrt{3}"),
    ("√3", r"\sqrt{3}"),
    ("sqrt(3)", r"\sqrt{3}"),
    ("2π", r"2\pi"),
    ("2 pi", r"2\pi"),
    (r"\left(x-2\right)\left(x+2\right)", "(x-2)(x+2)"),
    (r"10\%", "10"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    ("90°", "90"),
    ("90 degrees", "90"),
    ("90 square kilometers", "90"),
    ("90 sq. ft", "90"),
    ("90percent.", "90"),
    (r"10\text{ units}", "10"),
    (r"5\text{cm}^2", "5"),
    ("5 cm^2", "5"),
    ("12 inches", "12"),
    (r"36\pi \text{ square units}", r"36\pi"),
    ("x = 5", "5"),
    (r"x \in [0,1]", "[0,1]"),
    ("f(x) = x^2", "x^2"),
    ("y = 2x+3", "2x + 3"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\textbf{Even}", "even"),
    (r"\mathrm{A}", "A"),
    ("52_{8}", "52_8"),
    ("x^{2}", "x^2"),
    (r"1,\ 2\text{ and }3", "1,2,3"),
    (r"3 \text{ or } 4", "3, 4"),
    ("0.6666666667", "0.6666666667"),
    ("9", "9 (apples)"),  # as ASDiv writes
    ("9.", "9 (years old)"),
    (r"9 \text{ (apples)}", "9"),
    ("1/2 (mile)", r"\frac{1}{2}"),
    ("12", "12 (miles/hour)"),
    ("5", "5 (m)"),
    (r"4.5 \times 10^{33}", "4.5e33"),  # as Minerva
    (r"4.5 \cdot 10^{33}", "4.5 × 10^33"),
    ("3000000", "3e6"),
    ("1E-3", "0.001"),
    (r"-1.6 \times 10^{-19}", "-1.6e-19"),
    ("10^{6}", "1e6"),
    ("Option B", "B"),
    (r"\textbf{Option B}", "B"),
    ("choice C.", "C"),
]
SAME_VALUE = [  # answer, ground truth: spelled differently
    ("1 1/2", "3/2"),
    ("-1 1/2", r"-\frac{3}{2}"),
    ("3/2", r"1\frac{1}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("1 + 2i", "2i + 1"),
    ("x^2 - 1", "(x-1)(x+1)"),
    (r"x/2", r"\frac{x}{2}"),
    (r"\frac{25}{13}", r"1\frac{12}{13}"),
    ("4, 10, -2", "10, 4, -2"),
    (r"\{2, 1\}", "1, 2"),
    (r"\text{(C)}", "C"),
    ("Option (C)", "C"),
    ("33, 18", "33 (pennies); 18 (nickels)"),
    ("2^{10}", "1024"),
    ("10!", "3628800"),
    (r"\binom{10}{3}", "120"),
    (r"\sqrt{25}", "5"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{2} \\ 3 \end{pmatrix}"),
    ("2/3", "0.6666666667"),  # as MAWPS rounds
    ("10/3", "3.33333"),
    ("a + b = 7", "7"),
    (r"\alpha + \beta = 7", "7"),
    (r"\Delta = 25", "25"),
    (r"\phi(100) = 40", "40"),
    (r"\sigma^2 = 4", "4"),
    (r"2\sin\alpha\cos\alpha = \frac{24}{25}", r"\frac{24}{25}"),
    (r"\cos 2\alpha = \frac{7}{25}", r"\frac{7}{25}"),
    (r"\sin(\alpha+\frac{\pi}{6})=\frac{3}{5}", "0.6"),
    ("2 + 3 = 5", "5"),
]
EQUAL = [  # in both directions
    (r"\ln\frac1x", r"-\ln x"),
    (r"\ln(x+1)-\ln x", r"\ln\frac{x+1}{x}"),
    (r"\log_2(xy)", r"\log_2 x+\log_2 y"),
    (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"),
    (r"x\sqrt{x}", r"\sqrt{x^3}"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"(-8)^{1/3}", "-2"),
    (r"\sqrt[3]{1-x}", r"-\sqrt[3]{x-1}"),
    (r"\sqrt[3]{x^2}", r"x^{\frac{2}{3}}"),
    (r"\sqrt[3]{a^3b}", r"a\sqrt[3]{b}"),
    (r"\{|a|,|b|\}", r"\{|b|,|a|\}"),
    (r"\{x||x|<2\}", r"\{x:|x|<2\}"),
    (r"\{n \mid 3 \mid n\}", r"\{n : 3 \mid n\}"),
    (r"e^{\sqrt[3]{x^2+1}}", r"e^{(1+x^2)^{1/3}}"),
    ("1 child", "1 (children)"),
    ("9 potatoes", "9 (potato)"),
    (r"3\times x", "3x"),
    (r"2\times 10", "20"),
    (r"n\times n", "n^2"),
    ("v = at = 20", "20"),
    (r"s = ut + \frac12 at^2 = 20", "20"),
    ("V = lwh = 60", "60"),
    ("e > x", r"(-\infty, e)"),
    ("a < x", r"(a, \infty)"),
    ("RT^{-1}", r"\frac{R}{T}"),
    (r"\frac{V^T W}{2}", r"\frac12 V^T W"),
    ("3 kg of rice", "3 kg"),
    ("5 cm of rain", "5"),
    (
        r"\mathbb{R}\setminus\{\pm\sqrt2\}",
        r"(-\infty,-\sqrt2)\cup(-\sqrt2,\sqrt2)\cup(\sqrt2,\infty)",
    ),
    (r"\sin 22\frac{1}{2}^\circ", r"\sin 22.5^\circ"),
    (r"\tan 22\frac{1}{2}^\circ", r"\sqrt{2}-1"),
    (r"3-4{\rm i}", "3-4i"),
    (r"3-4\rm{i}", "3-4i"),
    (r"\mathrm i", "i"),
    (r"3\text{rd}", "3"),
    (r"23^{\text{rd}}", "23"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\mathbb{R}\setminus\{0\}", r"(-\infty,0)\cup(0,\infty)"),
    (r"x\neq 0", r"\mathbb{R}\setminus\{0\}"),
    (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
    (r"P(A)=\frac12", "0.5"),
    ("|AB|=5", "5"),
    (r"x>2 \text{ or } x<-2", r"(-\infty,-2)\cup(2,\infty)"),
    (r"x<-2\text{ or }x>2", r"x>2\text{ or }x<-2"),
    (r"\left(\begin{array}{c}1\\2\end{array}\right)", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("(x-1)^2+(y+2)^2=9", "x^2+y^2-2x+4y-4=0"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36"),
    (r"\text{(1, 2)}", "(1,2)"),
    ("(1,2),(3,4)", "(3,4),(1,2)"),
    (r"\langle 1,2\rangle", "(1,2)"),
    ("2√3/3", r"\frac{2\sqrt3}{3}"),
    ("π/2", r"\frac{\pi}{2}"),
    ("√(2)", r"\sqrt{2}"),
    ("3×10^8", "300000000"),
    ("30°", "30"),
    ("a_n=2n+1", "2n+1"),
    (r"33\frac{1}{3}\%", r"33\frac13"),
    (r"\frac{1}{-2}", r"-\frac12"),
    (r"0.5\text{ m/s}^2", "0.5"),
    ("9.8 m/s^2", "9.8"),
    (r"120\text{ km per hour}", r"120\text{ km/h}"),
    (r"5 \text{ kg}", r"5\text{ kilograms}"),
    (r"\text{5 cm}", "5"),
    ("40 miles per hour", "40"),
    (r"3 \text{ children}", "3"),
    (r"\$12.50", "12.5"),
    ("12.50 dollars", "12.5"),
    (r"4 \text{ hours} \text{ and } 30 \text{ minutes}", r"4\text{ hours and }30\text{ minutes}"),
    (r"S=\pi r^2", r"\pi r^2"),
    (r"\alpha=\frac{\pi}{3}", r"\frac{\pi}{3}"),
    (r"\overrightarrow{AB}", r"\overrightarrow{AB}"),
    (r"x=0,\ x=1", r"x=1,\ x=0"),
    ("1 < x < 2", "2>x>1"),
    ("1≤x≤2", "[1,2]"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"-5\le x\le 5", "[-5,5]"),
    (r"\frac{\sqrt{3}+\mathrm{i}}{2}", r"\frac{i+\sqrt3}{2}"),
    (r"\cos\theta+\mathrm{i}\sin\theta", r"\cos\theta+i\sin\theta"),
    (r"\mathrm{e}^{-1}", r"\frac{1}{e}"),
    (r"\ln 2+\mathrm{e}", r"e+\ln2"),
    (r"\mathbf{(B)}", "B"),
    (r"\text{B}", "B"),
    (r"B. \frac{1}{2}", "B"),
    (r"\textbf{(B) } \frac12", "(B)"),
    (r"\mathrm{(B)}\ \frac12", "B"),
    ("D) None of the above", "D"),
    (r"\text{D: none}", "D"),
    ("100 (dollars)", "100"),
    ("5.5 (feet)", "5.5"),
    ("1/2 (mile)", r"\frac12"),
    ("(a,b)", "(a, b)"),
    (r"2n\pi", r"2\pi n"),
    (r"\frac{k\pi}{2}, k\in\mathbb{Z}", r"\frac{k\pi}{2}, k\in\mathbb{Z}"),
    ("a(b+c)", "ab+ac"),
    (r"\dfrac{a+b}{2}", r"\frac12(a+b)"),
    ("x^{-1}", r"\frac1x"),
    (r"2^{-\frac12}", r"\frac{1}{\sqrt2}"),
    ("12345678901234567890", "12345678901234567890"),
    (r"1.0 \times 10^{-3}", "0.001"),
    (r"\frac{7}{2}\text{ or }3.5", "3.5, 7/2"),
    ("|x|<3", "|x|<3"),
    ("|x|", r"\left|x\right|"),
    (r"\text{No solution}", "no solution"),
    (r"\text{no real solutions}", "No real solutions"),
    (r"\emptyset", r"\{\}"),
    ("y=-2", "-2"),
    ("C=12", "12"),
    ("k=3", "3"),
    (r"-\infty<x<2", r"(-\infty,2)"),
    ("2500{,}5", "2500,5"),
    (r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}"),
    ("５", "5"),
    ("x²", "x^2"),
    (r"1-5\mathrm{i}", "1-5i"),
    (r"3\mathrm{e}", "3e"),
    (r"\frac{1}{2}\mathrm{i}", r"\frac{i}{2}"),
    (r"2+\mathrm{i}", "2+i"),
    (r"\mathrm{e}^2", "e^2"),
    (r"x\mathrm{e}^x", "xe^x"),
    (r"\mathrm{e}", "e"),
    (r"5\,\mathrm{cm}", "5"),
    (r"5\mathrm{~cm}", "5"),
    (r"5~\mathrm{m/s}", "5"),
    (r"5\mathrm{m}/\mathrm{s}", r"5\text{ m/s}"),
    (r"36^{\circ}\mathrm{C}", "36"),
    (r"10\text{ cm}^2", "10"),
    (r"10 \text{ square centimeters}", r"10\text{ cm}^2"),
    (r"10\text{ meters per second}", r"10\text{ m/s}"),
    (r"\$5", "5"),
    (r"5\%", "5"),
    (r"\$5.00", "5"),
    ("5 dollars", r"\$5"),
    (r"7 \text{ million}", r"7\text{ million}"),
    ("a.m.", "a.m."),
    (r"7:30\text{ p.m.}", "7:30 pm"),
    ("7:30 PM", "7:30 p.m."),
    (r"5 \text{ or more}", r"5\text{ or more}"),
    (r"\text{odd}", "odd"),
    ("A^T", "A^{T}"),
    ("x'", r"x^{\prime}"),
    (r"\frac{1}{2^{98}}", "2^{-98}"),
    ("e^{-100}", r"\frac{1}{e^{100}}"),
    ("abc/2", r"\frac{abc}{2}"),
    (r"\frac{xyz}{3}", "xyz/3"),
    (r"\pm 3", "3,-3"),
    ("-3, 3", r"\pm3"),
    (r"x=\pm 2", "2,-2"),
    ("y=2x+1", "2x-y+1=0"),
    ("x+y=3", "y=3-x"),
    ("3x+2y=6", r"\frac{x}{2}+\frac{y}{3}=1"),
    (r"\{x \mid x \geq 2\}", r"\{x|x\ge2\}"),
    (r"\{x: x>2\}", r"\{x : 2<x\}"),
    (r"\sqrt[3]2", r"\sqrt[3]{2}"),
    ("½", r"\frac12"),
    ("1½", "1.5"),
    ("√10", r"\sqrt{10}"),
    ("2√5", r"2\sqrt5"),
    ("x≤5", r"x\leq 5"),
    ("x ≥ 2", r"[2,\infty)"),
    ("2<x<5", "(2,5)"),
    (r"2\le x<5", "[2,5)"),
    ("(1，2)", "(1,2)"),
    (r"0.\overline{3}", r"\frac13"),
    (r"0.\dot{3}", "1/3"),
    (r"0.1\overline{6}", r"\frac16"),
    (r"0.\overline{142857}", r"\frac17"),
    (r"\varnothing", r"\emptyset"),
    (r"\{\}", r"\emptyset"),
    ("7=x", "7"),
    ("x=7", "7"),
    (r"\text{Area}=12", "12"),
    ("Area = 12", "12"),
    (r"\text{Area} = 12\text{ cm}^2", "12"),
    (r"60\text{ km/h}", "60"),
    ("60 kilometers per hour", "60 km/h"),
    ("(1011)_2", "1011_2"),
    ("1011_{2}", "1011_2"),
    (r"52_{\text{eight}}", "52_8"),
    ("n!/2", r"\frac{n!}{2}"),
    (r"{n \choose k}", r"\binom{n}{k}"),
    (r"\dbinom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\nicefrac{1}{2}", "0.5"),
    (r"\nicefrac12", "0.5"),
    (r"\boldsymbol{x+1}", "x+1"),
    (r"\mathbf{5}", "5"),
    (r"\textbf{(C)}\ 12", "C"),
    (r"\textbf{(C) }12", "C"),
    ("C", r"\textbf{(C)}\ 12"),
    ("(c)", "C"),
    ("C. 12", "C"),
    (r"\text{C}", "C"),
    ("288", "288 (t-shirts)"),
    ("57", "57 ( science books)"),
    ("9 apples", "9 (apples)"),
    (r"9\text{ apples}", "9"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\begin{pmatrix}1/2&0\\0&1\end{pmatrix}", r"\begin{pmatrix}\frac12&0\\0&1\end{pmatrix}"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"\frac{-1\pm\sqrt{5}}{2}", r"\frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2}"),
    ("12{,}345", "12345"),
    (r"12\,345", "12345"),
    ("12 345", "12345"),
    ("1,234", "1234"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("x=1, y=2", "y=2, x=1"),
    (r"x=1\text{ or }x=2", "1,2"),
    ("x=1,2", "1,2"),
    ("(x,y)=(1,2)", "(1,2)"),
    ("f(x)=x^2+1", "x^2+1"),
    ("y=x^2", "f(x)=x^2"),
    (r"\tan^{-1}(2)", r"\arctan 2"),
    (r"\sin^2x", r"(\sin x)^2"),
    ("a_1+a_2", "a_2+a_1"),
    (r"\vec{a}+\vec{b}", r"\vec{b}+\vec{a}"),
    (r"\mathbf{i}+\mathbf{j}", r"\mathbf{j}+\mathbf{i}"),
    (r"\frac{1}{\sqrt 2}", r"\frac{\sqrt2}{2}"),
    (r"\text{Yes}", "yes"),
    ("No", r"\text{no}"),
    ("3.1415927", r"\pi"),
    ("3.14159265358979323846264338328", r"\pi"),
    ("1.414214", r"\sqrt2"),
    (r"4.5\times10^3", "4500"),
    (r"\$1{,}000", "1000"),
    (r"-\frac12", r"\frac{-1}{2}"),
    (r"50\,\%", "50"),
    (r"12\text{ inches}", r"12\text{ in}"),
    (r"\dfrac{2}{3}", "2/3"),
    (r"\left\lvert x\right\rvert", r"\lvert x\rvert"),
    (r"\lfloor x\rfloor", r"\left\lfloor x \right\rfloor"),
    (r"3\sqrt{2}\text{ cm}", r"3\sqrt{2}"),
    (r"\frac{1}{2}\text{ hour}", "1/2"),
    (r"2\frac12", "2.5"),
    ("{2}", "2"),
    (r"5 \text{ years old}", "5"),
    (r"x \in (1,2)", "(1,2)"),
    (r"x\in\{1,2\}", r"\{2,1\}"),
    ("x<3", "3>x"),
    ("-x<-3", "x>3"),
    (r"2\cdot3^5", r"3^5\cdot2"),
    ("x^2 + 2xy + y^2", "(x+y)^2"),
    ("CO", r"\text{CO}"),
    (r"\triangle ABC", r"\triangle ABC"),
    (r"\angle A=30^\circ", "30"),
    ("AB=5", "5"),
    ("k(k+1)", "k^2+k"),
    ("e^{x+1}", r"e\cdot e^x"),
    (r"100\text{ square units}", "100"),
    (r"1 \text{ and } 3", "1,3"),
    ("(2n+1)!", "(1+2n)!"),
    ("0.5", ".5"),
    (r"11\frac{1}{2}\%", "11.5"),
    ("x^3-2x", "x(x^2-2)"),
    (r"\frac{a}{b}", "a/b"),
    ("1:2", "1 : 2"),
    ("10^{-3}", "0.001"),
    (r"\lambda=2", "2"),
    (r"\mathrm{A}\mathrm{B}", "AB"),
    (r"a+b\mathrm{i}", "a+bi"),
    (r"6\text{ ways}", "6"),
    (r"\text{Thursday}", "thursday"),
    (r"72 \text{ mph}", "72"),
    ("m=-2,n=3", "n=3,m=-2"),
    ("|x-1|", r"\left|x-1\right|"),
    # typesetting
    (r"x\in\mathbf{R}", r"x\in\mathbb{R}"),
    (r"\mathbf{R}", r"(-\infty,+\infty)"),
    (r"2\mathrm{A}_{16}", "(2A)_{16}"),
    ("4210_{five}", r"4210_5"),
    (r"{{n}\choose{2}}", r"\frac{n(n-1)}{2}"),
    (r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\left(\begin{matrix}-7\\16\end{matrix}\right)", r"\begin{pmatrix}-7\\16\end{pmatrix}"),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1,y=2"),
    ("x=1 \n y=2", r"x=1,\ y=2"),
    (r"x=1\quad y=2", "x=1,y=2"),
    ("60^o", "60"),
    (r"30\degree", "30"),
    ("x₁+x₂", "x_2+x_1"),
    ("φ+ε", r"\varphi+\varepsilon"),
    ("𝑥+1", "1+x"),
    ("⌊n/2⌋", r"\lfloor\frac{n}{2}\rfloor"),
    ("1,2,…,n", r"1,2,\cdots,n"),
    ("x<=2", r"x\leq 2"),
    ("①、③", "①③"),
    ("x=1或x=2", "1,2"),
    (r"\overrightarrow{AB}", r"\vec{AB}"),
    (r"\boldsymbol{x \in [-2,7]}", r"[-2,7]"),
    (r"\textcolor{red}{5}", "5"),
    (r"\mathbb{Z}^+", r"\mathbb{Z}^{+}"),
    (r"\text{an ellipse}", "ellipse"),
    # options
    ("A, C", "AC"),
    ("(A)(C)", r"\text{A and C}"),
    ("(D) both (A) and (B)", "D"),
    # lists, sets, intervals
    (r"\{-1,0,1\}", r"\{0,\pm1\}"),
    (r"\{x|-1<x\leqslant 2\}", "(-1,2]"),
    (r"\{x\mid x\ne1\}", r"(-\infty,1)\cup(1,+\infty)"),
    (r"\{x|x<-1\text{ or }x>3\}", r"(-\infty,-1)\cup(3,+\infty)"),
    (r"\{x\in\mathbf{R}|x>2\}", r"(2,\infty)"),
    (r"-1\leqslant a\leqslant 1", r"a\in[-1,1]"),
    (r"A\cap B", r"B\cap A"),
    (r"16\text{ cm and }12\text{ cm}", "16, 12"),
    (r"\{(1,2)\}", "(1,2)"),
    (r"3x\pm4y=0", r"y=\pm\frac34x"),
    (r"[k\pi,k\pi+\frac{\pi}{2}](k\in Z)", r"[k\pi,k\pi+\frac{\pi}{2}], k\in\mathbb{Z}"),
    # labels
    (r"\bar{z}=1-\mathrm{i}", "1-i"),
    (r"A\cup B=\{1,2\}", r"\{1,2\}"),
    (r"P(X=2)=\frac14", "0.25"),
    (r"\sin\alpha=\frac35", "3/5"),
    (r"m\angle A=40^\circ", "40"),
    (r"\vec{a}=(1,2)", "(1,2)"),
    (r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}", r"\frac{\sqrt6}{6}"),
    (r"\text{The area}=12", r"\text{Area}=12"),
    (r"m\angle A=40^\circ", r"\angle A=40"),
    (r"|AB|=5", r"\overline{BA}=5"),
    (r"S_{\triangle ABC}=6", "S=6"),
    (r"\frac{abcd}{2}", "abcd/2"),
    (r"\sqrt{29}\approx 5.39", r"\sqrt{29}"),
    # units
    (r"10\mathrm{~m}\cdot\mathrm{s}^{-1}", "10 m/s"),
    (r"9.8\ \mathrm{m\,s^{-2}}", r"9.8\text{ m/s}^2"),
    (r"5\,\mathrm{cm^{2}}", "5"),
    (r"6\mathrm{~N}-\mathrm{m}", "6"),
    ("105 yuan", "105"),
    ("28 pct", r"28\%"),
    ("75 (%)", "75"),
    ("5 pounds", "5 (pounds of sand)"),
    ("3 liters", "3 liters of water"),
    ("ln(2)", r"\ln 2"),
    ("sin(x)", r"\sin x"),
    ("y=6, x=5", "(5,6)"),
    (r"\angle ABC=30^\circ", r"\angle CBA=30^\circ"),
    (r"\$15\text{ per hour}", "15"),
    (r"\$0.50/\text{lb}", "0.5"),
    (r"\$-5", "-5"),
    (r"\$15/3", "5"),
    ("10 m^2", r"10\text{ m}^2"),
    ("10 m^3", r"10 \text{ cubic meters}"),
    ("5g", r"5\text{ g}"),
    ("y=6, x=5", "(x,y)=(5,6)"),
    ("(5,6)", "(x,y)=(5,6)"),
    (r"x>\pi", r"(\pi,\infty)"),
    (r"x\ge e", r"[e,\infty)"),
    ("x>a", r"(a,\infty)"),
    (r"x\in\emptyset", r"\emptyset"),
    (
        r"\begin{pmatrix}1\\0\end{pmatrix},\begin{pmatrix}0\\1\end{pmatrix}",
        r"\begin{pmatrix}0\\1\end{pmatrix},\begin{pmatrix}1\\0\end{pmatrix}",
    ),
    (r"\mathbb{R}\setminus\{1,-1\}", r"(-\infty,-1)\cup(-1,1)\cup(1,\infty)"),
    (r"\mathbb{R}\setminus\{1,-1\}", r"\mathbb{R}\setminus\{-1,1\}"),
    (r"\mathbb{R}\setminus\{1,k\pi\}", r"\mathbb{R}\setminus\{k\pi,1\}"),
    (r"5\text{ metres}", "5 meters of cloth"),
    ("5 feet", "5 (feet of rope)"),
    ("6 (long pieces)", "6 pieces"),
    ("1 (movie)", "1"),
    ("3 h 20 min", r"3\text{ hours and }20\text{ minutes}"),
    # formulas
    (r"e^{\sin x}", r"\frac{e^{\sin x+1}}{e}"),
    (r"e^{i\pi/4}", r"\frac{\sqrt2}{2}+\frac{\sqrt2}{2}i"),
    (r"\frac{\sqrt6-\sqrt2}{4}", r"\sin 15^\circ"),
    (r"\tan 45^\circ", "1"),
    (r"\sin^2x+\cos^2x", "1"),
    (r"\log_2 8", "3"),
    # only a lone whole number before a fraction is mixed with it
    (r"2^3\frac{1}{2}", "4"),
    (r"3!\frac{1}{2}", "3"),
    (r"\sin 2\frac{1}{2}", r"\sin 2.5"),
    (r"|\lfloor 2|x|\rfloor+1|", r"|1+\lfloor 2|x|\rfloor|"),
]
UNEQUAL = [  # answer, ground truth
    ("11_3", "11_2"),  # numbers in other bases
    ("2516_9", "2516_8"),
    ("24_{10}", "24_5"),
    (r"52_\text{seven}", r"52_\text{eight}"),
    (r"52_{\text{seven}}", r"52_{\text{eight}}"),
    ("2516", "2516_8"),
    ("1 1/2", "11/2"),
    ("6", "5"),
    ("5", "-5"),
    ("", "5"),
    ("1,2,3", "123"),
    ("4, 12, 2", "10, 4, 2"),
    ("(2,1)", "(1,2)"),
    ("[0,1)", "(0,1)"),
    ("4, 5", "5"),
    (r"5 \text{ or } 6", "5"),
    ("0.3333", r"\frac{1}{3}"),
    ("0.333333", r"\frac{1}{3}"),
    ("0.67", "0.6666666667"),
    ("9.434", "9.43"),
    ("0.0000001", "0"),
    ("10^{-7}", "0"),
    ("10 units", "100"),
    (r"\frac{1}{0}", "5"),
    ("seat", "east"),  # not a product of letters
    ("no", "on a"),
    ("A", "b"),
    ("٥", "5"),  # unicode digits, which \d and int() take
    ("2x", "x^2"),
    (r"\infty", r"-\infty"),
    ("7", r"\text{7 million}"),
    ("8", "9 (apples)"),
    ("5 (or 6)", "5"),
    ("5 (not 6)", "5"),
    ("12 (or 24 if counted twice)", "12"),
    ("12 (instead of 24)", "12"),
    ("3 (mod 5)", "3"),
    ("2", "2 (x)"),
    ("2", "2 (a + b)"),
    ("4.5e32", "4.5e33"),
    ("3e6", "3e-6"),
    ("2e", "2"),
    ("52", "5e2"),
    ("1.000001e3", "1e3"),
    ("Option A", "B"),
    ("Options", "B"),
    ("2100", "2, 100"),
    ("3, 100, 200", "3100200"),
]
DIFFERENT = [  # in both directions
    (r"2\theta = 60", "60"),
    (r"\theta - 20 = 60", "60"),
    (r"\sqrt[3]{-8}", r"1+\sqrt{3}i"),
    (r"\ln|x|", r"\ln x"),
    (r"|x|\ln|x|", r"|x|\ln x"),
    (r"x\sqrt{x^2-4}", r"\sqrt{x^4-4x^2}"),
    (r"b\sqrt{a^2c}", r"ab\sqrt{c}"),
    (r"\ln(x-5)", r"\ln(5-x)"),
    (r"\sqrt{x-5}", r"-\sqrt{x-5}"),
    (r"\sqrt{x}", r"\sqrt{|x|}"),
    ("x > a", r"(-\infty, a)"),
    ("A^{-1}B", r"\frac{B}{A}"),
    ("(AB)^{-1}", "A^{-1}B^{-1}"),
    ("3 kg of rice", "3 g"),
    (r"\sin 22\frac{1}{2}^\circ", r"\sin 11^\circ"),
    (r"2\frac{1}{2}^2+x", r"\frac{9}{4}+x"),
    (r"\arccot(\cot x)", "x"),
    # equal only where the formulas were compared
    ("|x+3|", "x+3"),
    ("|x-2|<5", "2-x<5"),
    (r"|\cos x|", r"\cos x"),
    (r"\arcsin(\sin x)", "x"),
    (r"\frac{n!}{(n-r)!}", r"\frac{n!}{n-r}"),
    (r"\binom{n}{2}", "4n-9"),
    (r"\lfloor n/2\rfloor+1", r"\lceil n/2\rceil"),
    ("(a+c)^2", "4b^2"),
    ("A^{-1}B^{-1}", "B^{-1}A^{-1}"),
    ("PDP^{-1}", "D"),
    (r"3\times 2", r"2\times 3"),
    ("P(A|B)=1/2", "P(B|A)=1/2"),
    ("AB:CD=2", "CD:AB=2"),
    (r"\angle ABC=30^\circ", r"\angle BAC=30^\circ"),
    ("b=1, a=2", "(1,2)"),
    (r"(1,5),(3,7)", r"(1,5)\cap(3,7)"),
    ("2 thirds of the class", "2"),
    ("5 twelfths", "5"),
    ("ln(2a)", "2lna"),
    ("x=5 at y=3", "3"),
    ("8 (excluding the first)", "8"),
    (r"\$5\text{K}", "5"),
    ("y=5, x=6", "(x,y)=(5,6)"),
    ("(b,a)=(1,2)", "a=1,b=2"),
    ("5 lakhs", "5"),
    ("9 (crore)", "9"),
    ("5m", "5"),
    (r"\$15 \text{ per hour}", r"\$15 \text{ per day}"),
    (r"\mathbb{R}\setminus\{1,k\pi\}", r"1,k\pi"),
    ("0.000014", "0.00001"),  # two digits are no rounding
    ("0.0000049", "0.00000"),
    ("2, 5e3", "25000"),  # a list
    (r"2, 5\times 10^3", "25000"),
    ("1,2e3", "12000"),
    (
        r"5\text{ kg m}^2",
        r"5\text{ kg}",
    ),  # a power of a unit is no noun
    (r"5\text{ m}^2\text{ s}", r"5\text{ s}"),
    (r"3\mathrm{x}", "3"),
    (r"5\mathrm{k}", "5"),
    (r"3\mathrm{i}", "3"),
    (r"\mathbf{u}+\mathbf{v}", r"\mathbf{u}-\mathbf{v}"),
    (r"5\text{ hundred}", "5"),
    (r"5\text{ degrees west}", r"5\text{ degrees east}"),
    (r"10\text{ (gain)}", r"10\text{ (loss)}"),
    (r"10\text{ (gain)}", "10"),
    (r"10\% \text{ decrease}", r"10\%\text{ increase}"),
    (r"4\text{ or fewer}", "4"),
    (r"6\text{ or }7", "6"),
    (r"\text{Saturday}", r"\text{Sunday}"),
    ("3:4:5", "3:5:4"),
    ("3:4", r"\frac34"),
    ("9:15", "3:5"),
    ("8:30 a.m.", "8:30"),
    ("B^T", "B"),
    ("B^{-1}", "B"),
    ("y''", "y'"),
    ("AB", "BA"),
    ("DE", "ED"),
    ("12 34", "1234"),
    ("3 1/2", r"\frac{31}{2}"),
    (r"\frac{1}{3}F_{1}+\frac23F_{2}", r"\frac{2}{3}F_{1}+\frac13F_{2}"),
    ("v_{0}t", "v_{0}"),
    (r"\beta^2-1", r"\gamma^2-1"),
    (r"\zeta(2)", r"\zeta(3)"),
    (r"\Gamma(3)", r"\Gamma(4)"),
    (r"\Delta", r"\delta"),
    ("R", "r"),
    ("2^{-98}", "2^{-99}"),
    ("-2^{-99}", "2^{-99}"),
    (r"\frac{1}{10^{30}}", "0"),
    ("e^{-50}", "e^{-51}"),
    (r"\sin(e^{-60})", r"\sin(e^{-61})"),
    ("|x|=-3", "|x|=-4"),
    ("x^2=-1", "x^2=-2"),
    ("x=y", "x=-y"),
    ("x>1", r"x\geq1"),
    ("(1,2]", "[1,2)"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("(1,2,3)", "(3,2,1)"),
    ("1011_2", "1011_3"),
    (r"\overline{AB}", r"\overline{CD}"),
    (r"A\cup B", r"A\cap B"),
    (r"A\subset B", r"B\subset A"),
    (r"p\land q", r"p\lor q"),
    (r"\neg p", "p"),
    (r"\sum_{k=1}^n k", r"\sum_{k=1}^n k^2"),
    (r"\int_0^1 x\,dx", r"\int_0^2 x\,dx"),
    (r"\lim_{x\to0}x", "x"),
    (r"\max(1,2)", r"\min(1,2)"),
    (r"\gcd(a,b)", r"\operatorname{lcm}(a,b)"),
    (r"\lfloor x\rfloor", r"\lceil x\rceil"),
    (r"\lfloor x\rfloor", "x"),
    ("[x]", "x"),
    (r"5\text{ km}", r"5\text{ miles}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    (r"100\text{ cm}", r"100\text{ m}"),
    (r"12\text{ boys}", r"12\text{ girls}"),
    ("12 (boys)", "12 (girls)"),
    (r"\text{A and B}", r"\text{A and C}"),
    ("A, B", "A, C"),
    ("(A)", "(B)"),
    ("(A) 5", "(B) 5"),
    ("ABC", "ABD"),
    (r"4\text{ hours and }30\text{ minutes}", r"4\text{ hours and }20\text{ minutes}"),
    (r"2.5\times10^3", r"2.5\times10^4"),
    ("10^{12}", "10^{13}"),
    (r"\frac{n(n+1)}{2}", r"\frac{n(n-1)}{2}"),
    ("x+1", "x+2"),
    (r"\sqrt{2}", "1.41"),
    ("3.14", r"\pi"),
    ("3.14159265358979323846264338329", r"\pi"),
    (r"50\% x", "50x"),
    ("(A,B)", "(B,A)"),
    ("22/7", r"\pi"),
    ("1.4142", r"\sqrt2"),
    ("f(x)", "g(x)"),
    ("f(2)", "2f"),
    ("1e5", "1e6"),
    (r"1-5\mathrm{i}", "-4"),
    (r"3\mathrm{e}", "3"),
    (r"x\mathrm{e}", "x"),
    (r"2\mathbf{a}", "2"),
    (r"3\mathbf{m}", "3"),
    (r"5\boldsymbol{s}", "5"),
    (r"7\text{ million}", "7"),
    (r"7\text{ billion}", r"7\text{ million}"),
    (r"7 \text{ thousand}", "7"),
    (r"8\text{ a.m.}", r"8\text{ p.m.}"),
    (r"8\text{ a.m.}", "8"),
    (r"n\text{ odd}", r"n\text{ even}"),
    (r"\text{odd}", r"\text{even}"),
    (r"20\text{ increase}", r"20\text{ decrease}"),
    (r"20\%\text{ increase}", r"20\%"),
    (r"5\text{ N}", r"5\text{ S}"),
    (r"30^\circ\text{N}", r"30^\circ\text{S}"),
    (r"5\text{ or more}", "5"),
    (r"5\text{ at most}", "5"),
    (r"\text{at least }5", "5"),
    ("1:2:3", "1:3:2"),
    ("2:15", "4:30"),
    ("12:30", "6:15"),
    ("5:1", "5 (markers)"),
    ("A^T", "A"),
    ("x'", "x"),
    ("f'", "f"),
    ("CO", "OC"),
    ("no", "on"),
    ("2 3", "23"),
    ("1/2 3", r"\frac{1}{23}"),
    (r"\frac{2}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}"),
    ("m_{p}", "m_{p}c"),
    (r"\gamma^{2}-1", "5"),
    (r"\gamma^{2}-1", r"\gamma^2-2"),
    (r"\Omega", r"\omega"),
    ("a", "A"),
    ("a+1", "A+1"),
    ("x_1", "x_2"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{2^{99}}", r"-\frac{1}{2^{99}}"),
    ("e^{-100}", "e^{-101}"),
    ("10^{-20}", "10^{-21}"),
    ("x+2^{-99}", "x+2^{-98}"),
    ("(2^{-99},1)", "(2^{-98},1)"),
    (r"\{e^{-99},1\}", r"\{e^{-98},1\}"),
    (r"\pm 3", "3"),
    ("y=2x+1", "y=2x-1"),
    ("x=5", "y=5"),
    ("|x|=-1", "x=-1"),
    ("|x|=-2", "|x|=-1"),
    ("x>2", r"x\ge2"),
    ("x>2", "x<2"),
    ("(2,5)", "[2,5)"),
    ("(2,5)", "(5,2)"),
    (r"\{x|x>2\}", r"\{x|x\ge 2\}"),
    (r"0.\overline{3}", "0.3"),
    ("0.33", r"\frac13"),
    (r"\emptyset", "0"),
    ("(1011)_2", "1011"),
    ("1011_3", "1011_2"),
    ("n!/2", "n!"),
    (r"\binom{n}{k}", r"\binom{n}{k+1}"),
    ("(C)", "D"),
    ("C. 12", "D. 12"),
    ("(C) 12", "(C) 13"),
    ("(C) 12", "D"),
    ("c", "C"),
    ("9 apples", "9 (oranges)"),
    ("9 apples", "8"),
    ("5 cm", "5 m"),
    ("5 cm", "5 cm^2"),
    (r"5\text{ km/h}", r"5\text{ m/s}"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("2(3)", "5"),
    ("xy", "x+y"),
    (r"\sqrt{x^2}", "x"),
    (r"\frac{dy}{dx}", r"\frac{y}{x}"),
    ("f(x+1)", "fx+f"),
    ("5 seat", "5 east"),
    (r"\text{seat}", r"\text{east}"),
    ("abc", "cab"),
    (r"\ln x", r"\log x"),
    (r"(1,2)\cup(3,4)", r"(1,2)\cup(3,5)"),
    ("1,2", "1,2,3"),
    ("1,1,2", "1,2,2"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("0/0", "1/0"),
    (r"2\pi", r"2\pi i"),
    (r"\sin x", r"\cos x"),
    (r"12\text{ dozen}", "12"),
    (r"3 \text{ (mod 5)}", "3"),
    (r"x\equiv 3", "3"),
    (r"10\text{ units}", "100"),
    (r"100\text{ m}", r"10\text{ m}"),
    (r"5 \text{ left}", r"5\text{ right}"),
    (r"\text{5 meters east}", r"\text{5 meters west}"),
    (r"5\text{ meters east}", r"5\text{ meters}"),
    (r"6.0\times10^{23}", r"6.1\times 10^{23}"),
    (r"\overline{AB}", "AB"),
    (r"\vec{a}", r"\vec{b}"),
    (r"\hat{x}", "x"),
    (r"3\hat{x}", "3x"),
    ("x^2_1", "x_2^1"),
    (r"\frac{n}{2}\text{ if n is even}", r"\frac{n}{2}"),
    (r"\text{2 hours}", r"\text{2 minutes}"),
    (r"\text{Both}", r"\text{None}"),
    ("II", "I"),
    ("5'", "5"),
    ("e", "2.718281"),
    ("1e3", "1"),
    ("2i", "2"),
    ("1+i", "1-i"),
    (r"\sqrt{-1}", "1"),
    (r"\mathrm{d}", "d x"),
    # options: what stands in or behind the bracket makes another answer
    ("(A), (C)", "A"),
    ("(A)(C)", "(A)"),
    ("(A) 5 (B) 6", "A"),
    ("A: 5, B: 6", "A"),
    ("(A)-(D)", "A"),
    ("(A)'", "A"),
    ("(A)+1", "A"),
    ("(A)^{-1}", "A"),
    ("(A)=3", "A"),
    ("AC", "CA"),
    # lists, sets, intervals
    ("(1,2)", r"\{1,2\}"),
    (r"\emptyset", r"\{\emptyset\}"),
    (r"x>2\text{ and }x<5", r"x>2\text{ or }x<5"),
    ("(0,125)", "(0,125]"),
    (r"(0,125)\cup(125,\infty)", r"(0,125]\cup(125,\infty)"),
    (r"241,920,00\text{ cans}", r"241,920,000\text{ cans}"),
    (r"x=\pm8", "x=8"),
    (r"x\neq\pm5", r"x\neq5"),
    (r"5 \mm", "5"),  # a command that LaTeX does not have, nearly \pm and \mp
    (r"x = 5 \pp", "x = 5"),
    (r"y=\frac{x^{2}}{3} \quad y=-x", r"y=\frac{x^{9}}{3} \quad y=-x"),
    ("y_1=1-x\ny_2=3", "y_1=1-y\ny_2=3"),
    (r"a\in A", "A"),
    # labels
    ("f(1)=2", "f(2)=2"),
    ("x_1=5", "x_2=5"),
    ("a_n=2n", "b_n=2n"),
    ("AB=5", "CD=5"),
    (r"\angle A=30^\circ", r"\angle B=30^\circ"),
    (r"\text{Area}=12", r"\text{Perimeter}=12"),
    (r"x=\frac{\pi}{2},\pi", r"y=\frac{\pi}{2},\pi"),
    ("2x=6", "6"),
    ("y=x+e^{40}", "y=x+e^{40}+1"),
    ("1+e^{-400}", "1"),
    ("x+e^{-999}", "x"),
    (r"y<x\sqrt2+2^{99}\pi", r"y<x\sqrt2+2^{99}\pi+1"),
    ("x=5 when y=3", "x=7 when y=3"),
    ("x=5 when y=3", "3"),
    ("x=2+3=5", "y=2+3=5"),
    ("x^2=9", "9"),
    (r"\sqrt2\approx 3", r"\sqrt2"),
    # units and nouns
    ("5{\\bf m}", "5"),
    (r"5\mathrm{~N}\cdot\mathrm{m}", r"5\mathrm{~m}"),
    (r"5\mathrm{~s}^{-1}", r"5\mathrm{~s}"),
    ("57 (math books)", "57 (science books)"),
    (r"12\text{ adult tickets}", r"12\text{ child tickets}"),
    ("$4", "4 cents"),
    (r"5 \, 6", "56"),
    ("5 (rejected)", "5"),
    ("5 (wrong)", "5"),
    ("5 (too much)", "5"),
    # formulas
    ("N2", "2N"),
    ("H2O", "HO2"),
    ("x2", "2x"),
    (r"\sin 15^\circ", r"\sin 15"),
    (r"\vec a\cdot\vec b", r"\vec a\times\vec b"),
    (r"\mathbf{a}\times\mathbf{b}", r"\mathbf{b}\times\mathbf{a}"),
    (r"A\times B", r"B\times A"),
    ("f^{(3)}", "f^3"),
    ("I(0)", "0"),
    ("y(1)", "y"),
    ("u(t)", "tu"),
    (r"\lfloor m/22\rfloor", r"\lfloor m/2\rfloor"),
    (r"\binom{a}{b}", r"2\binom{a}{b}"),
    (r"\sqrt2+10^{-140}", r"\sqrt2"),
    ("x+2^{-999}", "x+2^{-998}"),
    (r"1-\cos^2x-\sin^2x", r"10^{-100}"),
    ("XYZ", "xyz"),
]


# The rows of these tables are no tests of their own: that would cost more than the rows do.


def test_same_spelling(monkeypatch):
    monkeypatch.setattr(formulas, "same_value", lambda answer, truth: False)
    for pair in SAME_SPELLING:
        answer, truth = pair
        assert boxed_score(answer, truth) == boxed_score(truth, answer) == 1.0, pair
        assert normalize(answer) == normalize(truth) == normalize(normalize(answer)), pair


@pytest.mark.parametrize("answer, truth", SAME_VALUE)
def test_same_value(answer, truth):
    result = score_boxed(rf"\boxed{{{answer}}}", truth)
    assert result == {"score": 1.0, "pred": normalize(truth)}  # all right answers vote for the same


def test_unequal():
    for answer, truth in UNEQUAL:
        result = score_boxed(rf"\boxed{{{answer}}}", truth)
        assert result == {"score": 0.0, "pred": normalize(answer)}, (answer, truth)


def test_no_box_no_point():
    assert score_boxed("The answer is 5", "5") == {"score": 0.0, "pred": ""}
    assert score_boxed(r"\boxed{5", "5") == {"score": 0.0, "pred": ""}


def test_numbers_as_ground_truth():
    assert (
        score_boxed(r"\boxed{27}", 27.0)["score"] == score_dapo("Answer: 27", 27.0)["score"] == 1.0
    )


def test_a_list_is_no_number():
    """Thousands are separated by a comma alone."""
    assert score_dapo("Answer: 2, 100", "2,  100")["acc"]
    assert not score_dapo("Answer: 2100", "2, 100")["acc"]
    assert geometry.score_geo3k(r"\boxed{2, 100}", "2, 100")["acc"]
    assert not geometry.score_geo3k(r"\boxed{2100}", "2, 100")["acc"]
    assert score_dapo("Answer: (1,234)", "(1, 234)")["acc"]


@pytest.mark.parametrize(
    "truth", [["5"], {"answer": "5"}, None, float("nan"), float("inf")], ids=repr
)
def test_what_no_answer_can_be_is_no_truth(truth):
    for scorer in (score_boxed, score_dapo, geometry.score_geo3k):
        with pytest.raises(ValueError, match="is neither a text nor a finite number"):
            scorer(r"\boxed{5} Answer: 5", truth)
    several = [truth] if truth == ["5"] else truth if isinstance(truth, dict) else ["4", truth]
    with pytest.raises(ValueError, match="is neither a text nor a finite number"):
        visual_qa.score_visual_qa(r"\boxed{5}", several)


def test_only_short_answers():
    assert boxed_score("1" * 512, "1" * 512) == 1.0
    assert score_boxed(rf"\boxed{{{'1' * 513}}}", "1") == {"score": 0.0, "pred": ""}
    assert boxed_score("x+" * 150 + "1", "x+1") == 0.0


@pytest.mark.parametrize("scorer", [score_boxed, score_dapo])
@pytest.mark.parametrize("truth", ["", " ", "$$", "1" * 513])
def test_ground_truth_that_nothing_matches_is_an_error(scorer, truth):
    with pytest.raises(ValueError, match="no answer of 1 to 512 characters"):
        scorer(r"\boxed{5} Answer: 5", truth)


def test_equal():
    for pair in EQUAL:
        answer, truth = pair
        assert is_equal(answer, truth) and is_equal(truth, answer), pair
        assert is_equal(answer, answer) and is_equal(truth, truth), pair


def test_different():
    for pair in DIFFERENT:
        answer, truth = pair
        assert not is_equal(answer, truth) and not is_equal(truth, answer), pair


@pytest.mark.skipif(not PAIRS.is_file(), reason="no pairs beside the repository")
def test_pairs_of_public_reports():
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 39
    for row in rows:
        source = row["data_source"]
        result = score_response(reward_function(source), source, row["response"], row["truth"])
        assert result["score"] == row["expected"], row


def test_units_are_units_for_dapo_and_geometry():
    """And the imaginary unit is none; what is no unit makes another answer."""
    for answer, truth, right in [
        (r"1-5\mathrm{i}", "1-5i", True),
        (r"1-5\mathrm{i}", "-4", False),
        (r"3\mathrm{e}", "3", False),
        (r"3\mathbf{m}", "3", False),
        (r"7 \text{ billion}", r"7 \text{ million}", False),
        (r"5\text{ cm}", "5", True),
        (r"5\text{ cm}", r"5\text{ m}", False),
        ("(A), (B)", "A", False),
    ]:
        assert score_dapo(f"Answer: {answer}", truth)["acc"] == right, (answer, truth)
        assert geometry.score_geo3k(rf"\boxed{{{answer}}}", truth)["acc"] == right, (answer, truth)
    assert not geometry.score_geo3k(r"\boxed{x=5}", "y=5")["acc"]


@pytest.mark.parametrize(
    "answer, truth", [("x'", "x"), ("f''", "f'"), ("5!", "5"), (r"\Omega", r"\omega")]
)
def test_marks_and_case_of_symbols_count_for_pictures(answer, truth):
    assert visual_qa.score_visual_qa(rf"\boxed{{{answer}}}", [truth])["acc"] == 0.0
    assert visual_qa.score_visual_qa(r"\boxed{'B'}", ["B"])["acc"] == 1.0


# --- what is no formula, and what is too large to be computed ---


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}",
        "9^9^9",
        "2^{99999999}",
        r"\sqrt{9^{9999}}",
        "((9^{99})^{99})^{99}",
        "9!!",
        "(9!)!",
        "9^{9!}",
        "99999!",
        r"2^{\binom{50}{25}}",
        r"\binom{99999}{50000}",
        r"\binom{9999}{4999}^{2500}",
        r"e^{9^{9999}}",
        r"\sin(" * 7 + "x" + ")" * 7,
        r"\cosh(\cosh(\log_{\arcsin(\pi)}(e^{100})))",
        r"\ln(-1)",
        "(" * 50 + "5" + ")" * 50,
        "(" * 39 + r"\lfloor\lfloor x\rfloor\rfloor" + ")" * 39,
        r"\sin_2 x",
        r"\ln_2 8",
        r"\log_2_3 8",
        r"\sin^2^3 x",
        r"\log_2 8 3",
        r"\sum_{k=1}^{9} k",
        r"\int_0^1 x dx",
        "2 3",
        "f(x)",
        "1/0",
        "x+" * 100 + "x",
        "٣x",
        "x^",
        "(x",
        "x)",
        "x_",
        r"\alpha\beth",
        "",
    ],
)
def test_what_is_not_read_is_compared_by_its_spelling(text):
    with pytest.raises(Unreadable):
        read_formula(text)
    assert not is_equal(text, "x+1") and not is_equal("x+1", text)


@pytest.mark.parametrize(
    "answer, truth",
    [
        (r"(a+b+c+d+e+f)^{20}", r"(f+e+d+c+b+a)^{20}"),
        (r"\frac{x^{2500}-1}{x^{2499}-1}", r"\frac{1-x^{2500}}{1-x^{2499}}"),
        (r"(x+y+z)^{50}", r"(x+z+y)^{50}"),
        ("(" * 8 + "5" + ")" * 8, "10/2"),
        ("2^{2023}", r"2 \cdot 2^{2022}"),
        (r"\binom{n}{k}", r"\frac{n!}{k!(n-k)!}"),
        ("99!", r"99 \cdot 98!"),
    ],
)
def test_large_formulas_are_compared(answer, truth):
    """In a fraction of a second, which the deadline of the reward workers would notice."""
    start = time.process_time()
    assert is_equal(answer, truth) and not is_equal(answer, f"{truth}+1")
    assert time.process_time() - start < 5


def test_formulas_only_where_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(formulas, "same_value", lambda *texts: asked.append(texts) or False)
    pairs = [
        ("5", "5"),
        ("6", "5"),
        ("0.25", r"\frac{1}{3}"),
        ("Adam", "Eve"),
        ("", "5"),
        ("1" * 600, "5"),
    ]
    assert [boxed_score(*pair) for pair in pairs] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert asked == []
    boxed_score(r"1 + x\text{ cm}", "$x + 1$")
    assert asked == [("1 + x", "x + 1")]


# --- GSM8K ---


@pytest.mark.parametrize(
    "text, truth, right",
    [
        ("#### 3,5", "35", False),
        ("#### 3,5", "5", False),
        ("#### 1/2", "1", False),
        ("#### 5 or 6", "5", False),
        ("#### 5;  or 6", "5", False),
        ("#### 72,  80", "72", False),
        ("#### 3 1/2", "3", False),
        ("#### 5-6", "5", False),
        ("#### 5 to 6", "5", False),
        ("#### 5, 6", "5", False),
        ("#### 7 million", "7", False),
        ("#### 2x", "2", False),
        ("#### 1e3", "1", False),
        ("#### 5:30", "5", False),
        ("#### 1,23,456", "123456", False),
        ("#### 0,500", "500", False),
        ("#### 5!", "5", False),
        ("#### 5; 6", "5", False),
        ("#### 5, but 6 if she stays", "5", False),
        ("#### 5 is not right", "5", False),
        ("#### 5 hundredths", "5", False),
        ("#### 5 lakh", "5", False),
        ("#### 5 lakhs", "5", False),
        ("#### 3 fourths", "3", False),
        ("#### 5 divided by two", "5", False),
        ("#### 5 K", "5", False),
        ("#### 5 m", "5", True),
        ("#### 5, which is odd", "5", True),
        ("#### 72 clips", "72", True),
        ("#### 72 is the answer", "72", True),
        ("#### 72%", "72", True),
        ("#### 72km", "72", True),
        ("#### **72**", "72", True),
        ("#### 1,234,567.", "1234567", True),
        ("#### $1,234.50", "1234.5", True),
        ("#### 10 more apples", "10", True),
        ("#### 5 less apples", "5", True),
    ],
)
def test_a_number_of_gsm8k_ends_where_it_ends(text, truth, right):
    assert score_gsm8k(text, truth)["score"] == right


@pytest.mark.parametrize(
    "text, truth, score",
    [("#### 3,5", "35", 1), ("#### 1/2", "1", 1), ("#### 72.", "72", 0), ("72", "72", 0)],
)
def test_the_rule_of_verl_is_there(text, truth, score):
    assert verl_gsm8k("openai/gsm8k", text, truth) == score


# --- DAPO ---


@pytest.mark.parametrize(
    "text, truth, expected",
    [
        ("Answer: 204", "204", 1),
        ("so\n\nAnswer: $204$", "204", 1),
        ("ANSWER : 204.", "204", 1),
        ("Answer:\n204", "204", 1),
        ("**Answer: 204**", "204", 1),
        ("**Answer:** 204", "204", 1),
        (r"Answer: \boxed{204}", "204", 1),
        (r"Answer: $\boxed{204}$, which we had to find.", "204", 1),
        (r"Answer: \frac{1}{2}", "0.5", 1),
        ("Answer: m + n = 204", "204", 1),
        ("Answer: 025", "25", 1),
        ("Answer: 1,000", "1000", 1),
        ("Answer: 12 degrees", "12", 1),
        (r"Answer: (A) \sqrt{4}", "(A) 2", -1),  # formulas are not computed, not behind a letter
        ("Answer: 71\nAnswer: 204", "204", 1),
        ("Answer: The sum is $204$.", "204", 1),  # the first $...$, as in verl
        ("Answer: $m + n = 204$ is the sum", "204", 1),
        ("Answer: $71$ or $204$", "204", -1),
        ("Answer: $x$ = 204", "204", 1),
        ("Answer: $m+n$ = $204$", "204", 1),
        ("Answer: For $n$ the sum is $a+b=204$", "204", 1),
        ("Answer: For $204$ the sum is $a+b=71$", "204", -1),
        ("Answer: 71 Answer: 204", "204", 1),
        ("Answer: 204\nAnswer: ", "204", 1),
        ("Answer: 204\nAnswer: 71", "204", -1),
        ("Answer: 205", "204", -1),
        ("Answer: -204", "204", -1),
        ("Answer: 204 or 205", "204", -1),
        ("Answer: ٢٠٤", "204", -1),
        ("Anſwer: 204", "204", -1),
        ("The answer is 204", "204", -1),
        (r"\boxed{204}", "204", -1),
        ("204", "204", -1),
        ("", "204", -1),
        ("Answer: 204" + " " * 289, "204", 1),
        ("Answer: 204" + " " * 290, "204", -1),  # the last 300 characters
    ],
)
def test_dapo(text, truth, expected):
    result = score_dapo(text, truth)
    assert list(result) == ["score", "acc", "pred"]
    assert (result["score"], result["acc"]) == (float(expected), expected == 1)
    if result["acc"]:
        assert result["pred"] == normalize(truth)


def test_dapo_pred():
    assert score_dapo("Answer: 0071.0", "204")["pred"] == "71"
    assert score_dapo("nothing", "204")["pred"] == ""


# --- choice by data_source ---


@pytest.mark.parametrize(
    "function, sources",
    [
        (
            boxed_reward,
            "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 "
            "math/aime24 math/amc23 "
            "math/svamp amc23 svamp mawps_addsub numina_olympiads",
        ),
        (dapo_reward, "math_dapo math_dapo_reasoning math aime aime2024 aime_2025"),
        (reward_function("openai/gsm8k"), "gsm8k local/gsm8k math/gsm8k"),
        (reward_function("countdown"), "countdown math/countdown MATH-countdown"),
    ],
)
def test_dispatch(function, sources):
    for source in sources.split():
        assert reward_function(source) is function, source


def test_scores_through_the_dispatcher():
    score = score_response(reward_function("lighteval/MATH"), "lighteval/MATH", r"\boxed{5}", "5")
    assert score == {"score": 1.0, "pred": "5"}
    score = score_response(reward_function("aime2024"), "aime2024", "Answer: 6", "5")
    assert score == {"score": -1.0, "acc": 0.0, "pred": "6"}


# --- hostile text, for all scorers ---

SCORERS = {
    "countdown strict": lambda text: countdown.score(text, {"numbers": [1, 2, 3], "target": 6}),
    "countdown compat": lambda text: countdown.score(
        text, {"numbers": [1, 2, 3], "target": 6}, "compat"
    ),
    "gsm8k": lambda text: score_gsm8k(text, "72"),
    "boxed": lambda text: score_boxed(text, r"\frac{\sqrt{3}}{2}"),
    "dapo": lambda text: score_dapo(text, "204"),
}
MEGABYTES = HOSTILE | {
    "boxes": r"\boxed{" * (MEGA // 7),
    "boxes, then closed": r"\boxed{" * (MEGA // 14) + "}" * (MEGA // 14),
    "whole boxes": r"\boxed{5}" * (MEGA // 9),
    "box of braces": r"\boxed{" + "{" * (MEGA // 2) + "}" * (MEGA // 2) + "}",
    "open braces": r"\boxed{5}" + "{" * MEGA,
    "closed braces": r"\boxed{5}" + "}" * MEGA,
    "box of digits": r"\boxed{" + "9" * MEGA + "}",
    "box of powers": r"\boxed{" + "9^" * (MEGA // 2) + "9}",
    "box of spaces": r"\boxed{5" + " " * MEGA + "}",
    "space after the box": r"\boxed" + " " * MEGA + "{5}",
    "boxes without braces": r"\boxed 5" * (MEGA // 8),
    "word boxes": r"\boxed x$" * (MEGA // 9),
    "one long word": r"\boxed " + "x" * MEGA,
    "backslashes": "\\" * MEGA,
    "backslashes in a box": r"\boxed{" + "\\" * MEGA + "}",
    "escaped braces": r"\boxed{" + r"\{" * (MEGA // 2) + "}",
    "answers": "Answer: " * (MEGA // 8),
    "long answer": "Answer: " + "5" * MEGA,
    "fractions": r"\boxed{" + r"\frac{1}{" * (MEGA // 9) + "}" * (MEGA // 9) + "}",
    "unicode": r"\boxed{" + "٣²½−√∞" * (MEGA // 6) + "}",
}


@pytest.mark.parametrize("name", MEGABYTES)
def test_megabyte_text_takes_linear_time(name):
    """The slowest takes 0.4 s of CPU time for all the scorers together; what is quadratic takes
    minutes."""
    start = time.process_time()
    for scorer in SCORERS.values():
        scorer(MEGABYTES[name])
    assert time.process_time() - start < 2.0


def test_longest_answers_take_linear_time():
    """At the limit of 512 characters, where no regex may go astray; each takes a millisecond."""
    patterns = ["1", "1,", "5 ", " ", ".", "a", "oooo", "x=", ", and ", "((", "{", "^{"]
    patterns += [r"\\", r"\frac", r"\text{", r"\sqrt("]
    for pattern in patterns:
        answer = (pattern * 512)[:512]
        start = time.process_time()
        for text in (answer, answer + "x", "x" + answer, "1" + answer[:-1], f"1={answer[:508]}1"):
            is_equal(text[:512], "x+1")
        assert time.process_time() - start < 0.25, pattern


PIECES = [
    *"0123456789+-*/(){}[]<>^_=|!,.;:$%&~#' \n\t\r\0\\xyzie",
    *(
        "٣",
        "５",
        "²",
        "½",
        "−",
        "×",
        "π",
        "√",
        "∞",
        "°",
        "é",
        "好",
        "\u202e",
        "\ud800",
        "\U0001d7d9",
    ),
    *(
        "<answer>",
        "</answer>",
        "####",
        "Answer:",
        "answer :",
        "Assistant:",
        "**",
        "//",
        " and ",
        " cm",
        "inf",
        "NaN",
    ),
    *(
        r"\boxed{",
        r"\fbox{",
        r"\boxed ",
        r"\frac",
        r"\frac{1}{2}",
        r"\sqrt",
        r"\sqrt{2}",
        r"\text{",
        r"\text{ cm}",
    ),
    *(
        r"\left(",
        r"\right)",
        r"\{",
        r"\}",
        r"\\",
        r"\pi",
        r"\infty",
        r"\cup",
        r"\log",
        r"\sin",
        r"\circ",
        r"\%",
    ),
    *(
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\binom{9}{4}",
        r"\sum_{k=1}^{99}",
        "^{9^{9^9}}",
        "^{99999999}",
        "9!",
    ),
]


def fuzzed(rng: random.Random) -> str:
    """Random pieces, at times repeated, nested or cut; half of them where the scorers look for an
    answer."""
    text = "".join(rng.choices(PIECES, k=rng.choice((1, 3, 8, 20, 60))))
    if rng.random() < 0.2:
        piece = rng.choice(PIECES)
        bracket = rng.choice("})]")
        text = rng.choice(
            (piece * rng.choice((10, 100, 700)) + text, f"{piece * 30}{text}{bracket * 30}")
        )
    if rng.random() < 0.5:
        text = f"<answer>{text}</answer>\n#### {text}\n\\boxed{{{text}}} Answer: {text}"
    return text[: rng.randrange(len(text))] if rng.random() < 0.1 else text


POSSIBLE = {
    "countdown": (0.0, 0.1, 1.0),
    "gsm8k": (0.0, 1.0),
    "boxed": (0.0, 1.0),
    "dapo": (-1.0, 1.0),
}


def fuzz(seed: int, count: int) -> None:
    rng = random.Random(seed)
    slowest = 0.0
    for _ in range(count):
        text = fuzzed(rng)
        for name, scorer in SCORERS.items():
            start = time.process_time()
            try:
                result = scorer(text)
            except Exception as error:
                raise AssertionError(f"{name} raised on {text!r}") from error
            slowest = max(slowest, time.process_time() - start)
            assert result["score"] in POSSIBLE[name.split()[0]], (name, text)
            assert isinstance(result["pred"], str), (name, text)
    assert slowest < 0.5


def test_fuzz_all_scorers():
    fuzz(seed=0, count=300)


@pytest.mark.slow
def test_fuzz_all_scorers_for_long():
    fuzz(seed=1, count=100_000)


# --- real problems ---


@pytest.mark.skipif(not DATA.is_dir(), reason="no benchmarks beside the repository")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_benchmarks_from_file_to_score(tmp_path, every):
    """Of every eighth row right and wrong answers are scored."""
    prepare.main(prepare.Args(out=tmp_path, source=str(DATA)))
    rows = pq.read_table(tmp_path / "test.parquet").to_pylist()
    counts = {}
    for row in rows:
        source = row["data_source"]
        truth = row["reward_model"]["ground_truth"]
        counts[source] = counts.get(source, 0) + 1
        function = reward_function(source)
        assert function is boxed_reward
        if row["extra_info"]["index"] % every:
            continue
        assert (
            score_response(function, source, rf"so $\boxed{{{truth}}}$", truth)["score"] == 1.0
        ), row
        assert (
            score_response(function, source, rf"so $\boxed{{1{truth}}}$", truth)["score"] == 0.0
        ), row
        assert score_dapo(f"Answer: {truth}", truth)["score"] == 1.0, row
        assert (
            row["prompt"][0]["content"] == f"{row['extra_info']['question']} {prepare.INSTRUCTION}"
        )
    mawps = {"math/mawps_addsub": 395, "math/mawps_multiarith": 600, "math/mawps_singleop": 562}
    assert counts == {"math/aime24": 30, "math/amc23": 40, "math/svamp": 1000, **mawps}
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    solved = [
        score_boxed(row["extra_info"]["answer"], row["reward_model"]["ground_truth"])["score"]
        for row in rows
        if row["data_source"] == "math/aime24"
    ]
    assert sum(solved) >= 25  # the published solutions; some end without a box
