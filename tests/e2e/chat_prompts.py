"""User turns that the demo model's greedy text is compared on: twenty with short, well-known answers; forty more."""

CHAT_PROMPTS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about the sea.",
    "What is 7 plus 5?",
    "Explain what a computer does in simple words.",
    "Who wrote Romeo and Juliet?",
    "List the days of the week.",
    "What do plants need to grow?",
    "Translate 'good morning' into French.",
    "Give me a short recipe for pancakes.",
    "Why is the sky blue?",
    "What is the opposite of hot?",
    "Write a short poem about winter.",
    "How many legs does a spider have?",
    "What is the largest planet in the solar system?",
    "Suggest a name for a cat.",
    "What is water made of?",
    "Describe a library in two sentences.",
    "What comes after Tuesday?",
    "Tell me a fact about elephants.",
]

_TOPICS = [
    "the moon", "volcanoes", "honey bees", "the French Revolution", "photosynthesis", "gravity", "bread",
    "the Great Wall of China", "penguins", "electric cars",
]  # fmt: skip
_REQUESTS = [
    "Tell me about {}.",
    "Explain {} to a child.",
    "Write one surprising fact about {}.",
    "Why are people interested in {}?",
]

MORE_PROMPTS = [request.format(topic) for topic in _TOPICS for request in _REQUESTS]
"""Forty more, for figures that twenty are too few for."""
