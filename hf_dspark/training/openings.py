"""Beginnings of user turns, so that a target left to itself asks for more than its favourite things."""

from __future__ import annotations

# Beginnings of user turns, one a line (⏎ is a line break). A small target left to itself always asks for the same few
# things; an opening moves it to code, mathematics or conversation, and it finishes the request in its own words.
OPENINGS = (
    *[""] * 12,
    *(
        line.replace("⏎", "\n")
        for line in """\
Write a Python function that
Write a Python function to
Complete the following Python function.⏎⏎```python⏎def
def
from typing import List⏎⏎⏎def
import math⏎⏎def
Fix the bug in this code:⏎⏎
Explain what this code does:
Write a function in JavaScript
Write a SQL query
Write a program
Implement a class
What does the Python
A baker
A farmer has
Tom has
Maria buys
John and his friends
A train travels
In a class of
Every day,
Sarah earns $
There are
A store sells
If a car
Calculate the total
How many
A rectangle has
Last week,
Solve for x:
Let $x$ be
Find the value of $
What is the sum of
Compute $\\frac
Simplify
Evaluate
Suppose $f(x)
The roots of
A triangle has sides
Find the number of
What is the probability that
Prove that
Two dice
Explain
What is the difference between
How do I
How does
Why do
What are the main
Can you
Who was
Write a short story about
Write an email to
Compose a
Summarize the
Rewrite the following sentence
Imagine you are
Give me a list of
Describe
Pretend to be
Write a blog post about
Write a poem
Translate
Compare
Suggest
I need advice
Help me
Tell me about
What should I
Create a plan
Design a
Classify
Extract
Discuss""".splitlines()
    ),
)
