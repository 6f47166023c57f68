"""How the bytes of a round move. Begin with `member`.

`leader` leads the averaging of one attempt. `member` takes part in it: it sends our chunks to the reducers, and holds
the means. If we are a reducer, `collection` has the chunks of our part, and `reducer` averages them. `part_store`
pushes, takes, keeps and serves the means. `audit` averages a part again after the round.
"""
