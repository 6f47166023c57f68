"""The round protocol: one outer all-reduce, decided by a quorum, with any member free to fail at any message.

`ballot` holds the voting rules, `contribution` what a member sends, `reduction` what a reducer does, `leader` drives
one attempt, `engine` is the member that all of them serve.
"""
