"""What the recipes of the cookbook write to the model, rendered as the renderer `qwen3` does it."""

WORDS = "Put the parcel on the table by the window and close the garden door behind you ."
QUESTION = "What is {} + {}?"
BOXED = " Provide a numerical answer without units, written inside \\boxed{{}}."
STRAWBERRY = (
    "How many r's are in strawberry?" + BOXED.format(),
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
    "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)
GUESS = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format "
    "Guess: <guess> (without the angle brackets), and say nothing else. Then we will tell you whether you "
    "guess is too high, too low, or correct."
)
FAILED = (
    "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), "
    "and say nothing else."
)
NO_THINKING = "<think>\n\n</think>\n\n"


def prompt(*turns: tuple[str, str], suffix: str = "") -> str:
    """Turns of (role, content), and the head of the answer."""
    spoken = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{spoken}<|im_start|>assistant\n{suffix}"


def sum_alone(x: int, y: int) -> str:
    """The end of a question, and the head of the answer."""
    return f"{x} + {y}?<|im_end|>\n<|im_start|>assistant\n"


def arithmetic(x: int, y: int) -> str:
    """Of `math_rl.arithmetic_env`, with its example."""
    example = (("user", QUESTION.format(4, 5)), ("assistant", "9"))
    return prompt(*example, ("user", QUESTION.format(x, y)))


def boxed(x: int, y: int) -> str:
    """Of `rl_loop`, with its example."""
    question, answer = STRAWBERRY
    example = (("user", question), ("assistant", answer))
    return prompt(*example, ("user", QUESTION.format(x, y) + BOXED.format()))


def guess(*exchange: tuple[str, str]) -> str:
    """Of `multiplayer_rl.guess_number`, after guesses and what was said to them."""
    turns = [turn for said, heard in exchange for turn in (("player", said), ("user", heard))]
    return prompt(("system", GUESS), *turns, suffix=NO_THINKING)
