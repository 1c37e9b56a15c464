"""The code reward: functions and programs that have to pass tests."""
