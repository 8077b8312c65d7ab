# Run at every build: writes HEADER with the version and the commit that is being built, if they have changed.
execute_process(COMMAND git describe --always --dirty --abbrev=12 WORKING_DIRECTORY ${SOURCE}
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "// Made by cmake/version.cmake.
#define ROWNORM_VERSION \"${VERSION}\"
#define ROWNORM_COMMIT \"${commit}\"
#define ROWNORM_COMPILER \"${COMPILER}\"
#define ROWNORM_BUILD_TYPE \"${BUILD_TYPE}\"
")
