"""The rewards of a run file, one class and one file of its name each: the options, and how it scores.

`rollmill.config.rewards` searches this package, so that a file is all that a new reward needs. Reading a run file
imports every module here: what needs torch or another slow library imports it inside its methods, and nothing here may
import the sections that have rewards (`rollmill.config.run`), except inside.
"""
