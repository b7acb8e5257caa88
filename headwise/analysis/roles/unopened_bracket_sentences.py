"""Sentences with an unopened closing bracket or quotation mark: controls for roles that attend to the opening mark.

A bracket follows the letter or number of a list item; a straight quotation mark stands for inches after feet. Only sentences
in which the model predicts the mark are used.
"""

CONTROL_SENTENCES = {
    "bracket": (
        "To pack: a) two shirts b) a warm coat c) boots d) matches e) a map",
        "The steps are: 1) boil the water 2) add the rice 3) stir 4) wait 5) serve",
        "Choose one of these answers: a) never b) seldom c) often d) always",
        "There are three reasons: i) the cost ii) the noise iii) the smell",
        "Rules of the house: 1) no shoes 2) no pets 3) no music after ten 4) no smoke",
        "We need: a) flour b) sugar c) eggs d) butter e) milk f) salt",
        "Agenda: 1) minutes of the last meeting 2) budget 3) elections 4) other matters",
        "The capital of France is: a) Rome b) Paris c) Madrid d) Berlin",
        "Before you leave: 1) close the windows 2) turn off the stove 3) lock the door",
        "Parts of the letter: a) address b) date c) greeting d) signature",
        "Sources: 1] the diary of the captain 2] the letters of his wife 3] the log of the ship 4] a map",
        "Notes: 1] see the first chapter 2] see the second chapter 3] see the third chapter 4] lost",
        "Items: a] one lamp b] two chairs c] three cups d] four spoons e] a clock",
        "Entries: 1] born in the north 2] moved to the coast 3] married twice 4] died at sea",
        "Figures: 1] the mill 2] the bridge 3] the tower 4] the harbour 5] the market",
        "Lists: 1] apples and pears 2] bread and cheese 3] salt and pepper 4] tea and coffee",
    ),
    "quote": (
        "The new goalkeeper is 6'4\" and wears gloves of his own.",
        "My brother is 6'3\" by now.",
        "The man who called was about 5'9\" and bald.",
        "She is only 5'2\" but sings like thunder.",
        "The suspect is 5'11\" with grey eyes.",
        "In one summer he grew to 6'5\" and left school.",
        "I am 5'7\" on a good day.",
        "Her height is 5'6\" in the old passport.",
        "The door is 6'8\" high.",
        "The bed is 6'6\" long and far too short for him.",
        "The board is 2' 6\" long.",
        "The rookie, at 6'9\" the tallest of all, missed the bus.",
        "He is a 6'2\" sailor from the north.",
        "His wife is 5'4\" at most.",
        "We looked for a guy who is 6'1\" and walks with a stick.",
        "The doctor wrote that the boy was 4'10\" and healthy.",
    ),
}
