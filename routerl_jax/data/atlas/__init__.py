"""Atlas: a small world of real facts about countries and chemical elements, with knowledge bases, questions and gold paths."""
