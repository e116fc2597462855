import loragate.world.tokenizer as vocabulary


def test_144_different_words_without_white_space():
    words = vocabulary.words()
    assert len(words) == len(set(words)) == 144
    assert all(word == "".join(word.split()) for word in words)


def test_padding_and_end_come_first():
    assert vocabulary.words()[:2] == ["<pad>", "<eos>"]


def test_every_style_has_the_size_that_the_noise_relies_on():
    sizes = [len(vocabulary.OPENERS), len(vocabulary.CONNECTIVES), len(vocabulary.EQUALITIES), len(vocabulary.CLOSERS)]
    assert sizes == [8, 8, 6, 8]
