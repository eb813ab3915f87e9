// The one exception type of the core. `code` is a value of syshax.errors' table; the message says what is
// wrong, where, the value seen; the hint says what helps.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>

namespace syshax {

class CoreError : public std::runtime_error {
 public:
  CoreError(std::string code, const std::string& message, std::string hint = {})
      : std::runtime_error(message), code_(std::move(code)), hint_(std::move(hint)) {}
  const std::string& code() const { return code_; }
  const std::string& hint() const { return hint_; }

 private:
  std::string code_, hint_;
};

}  // namespace syshax
